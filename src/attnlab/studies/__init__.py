"""Studies: one room per paper, and the demo. To add one: a module with a STUDY beside these, and a line below."""

STUDIES: dict[str, str] = {  # the module of each, imported when it is asked for
    "snell2021": "attnlab.studies.snell2021",
    "kobayashi2020": "attnlab.studies.kobayashi2020",
    "zheng2021": "attnlab.studies.zheng2021",
    "heo2024": "attnlab.studies.heo2024",
}
