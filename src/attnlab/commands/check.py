"""attnlab check: run the laws of attention on a mechanism and print the result of each."""

from collections.abc import Sequence

from rich.text import Text

from attnlab.config import parse_value, split_pairs
from attnlab.mechanisms import attention, find_mechanism, parse_options
from attnlab.mechanisms.kinds import list_kinds
from attnlab.mechanisms.laws import LAWS, judge_law
from attnlab.mechanisms.mechanism import Mechanism
from attnlab.terminal import show_table


def check_laws(name: str, settings: Sequence[str]) -> bool:
    """Print for each law whether it holds, with the numbers; return whether none fails."""
    find_mechanism(name)
    values = split_pairs(settings)
    sizes = {key: parse_value(values.pop(key, text), int, key) for key, text in (("heads", "3"), ("head_dim", "6"))}
    options = parse_options(name, values)

    def build(layer: int) -> Mechanism:
        return attention(name, **sizes, **{"layer": layer} | options)

    build(1)  # raises what is wrong with the options
    findings = [judge_law(law, build) for law in LAWS]
    words = {True: Text("holds", "green"), False: Text("FAILS", "red"), None: Text("–")}
    rows = [
        [f.law, words[f.holds], "" if f.holds is None else f"{f.worst:.1e}", f"{f.allowed:.0e}", f.compared]
        for f in findings
    ]
    show_table(f"laws on {name}", ["law", "", "worst", "allowed", "compared"], rows)
    failed = sum(f.holds is False for f in findings)
    if not failed:
        print(f"kind: {', '.join(list_kinds(build)) or 'plain'}")
    held = sum(f.holds is True for f in findings)
    others = {"not applicable": len(findings) - held - failed, "failed": failed}
    print("; ".join([f"{held} of {len(findings)} laws hold", *(f"{n} {what}" for what, n in others.items() if n)]))
    return not failed
