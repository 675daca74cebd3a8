"""Studies: one room per paper. To add one, write a module with a STUDY, and a line in STUDIES."""

from importlib import import_module

from attnlab.config import suggest_nearest
from attnlab.experiments.study import Study

STUDIES: dict[str, str] = {  # the module of each, imported on demand
    "snell2021": "attnlab.studies.snell2021",
    "kobayashi2020": "attnlab.studies.kobayashi2020",
    "zheng2021": "attnlab.studies.zheng2021",
    "heo2024": "attnlab.studies.heo2024",
}


def open_study(name: str) -> Study:
    """Import a study by its name; the error about an unknown name suggests the nearest."""
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}{suggest_nearest(name, STUDIES)}; available: {', '.join(STUDIES)}")
    return import_module(STUDIES[name]).STUDY
