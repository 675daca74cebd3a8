"""Word alignment by translators that are trained here, German–English: from raw Europarl to a table of AER.

    python benchmarks/trained_alignment.py --work FOLDER --prepare [--pairs 480000]        a CPU, minutes, once
    python benchmarks/trained_alignment.py --work FOLDER [--until 9m] [--device cuda] [--out results/alignment-readings]

The first command writes FOLDER/train.de.gz and so on: Moses' words in lower case, without pairs that have a side in the
gold set. FOLDER then has all that the second command needs, on another machine too. That command runs in turn

    attnlab train          de → en and en → de at once, the iwslt14 model
    attnlab align-train    an aligner on both encoders, without gold links
    alignment_readings.py  every reading on the 508 gold pairs, with intervals

Near the deadline it stops at a checkpoint; the same command continues. The total time is in FOLDER/seconds.json and in
the results.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from attnlab.experiments.deadline import Deadline
from attnlab.files import write_text
from attnlab.studies.kobayashi2020.plan import read_gold_pairs, remove_gold, tokenize_pairs
from attnlab.tasks.parallel import find_parallel_text
from attnlab.tasks.translation import TranslationConfig

HERE = Path(__file__).parent
LANGUAGES = ("de", "en")
DIRECTIONS = (("de", "en"), ("en", "de"))
SETTINGS = {
    "model": "iwslt14", "dropout": "0.1", "subwords": "bpe", "vocabulary": "10000", "joint": "false",
    "max_length": "256", "too_long": "skip", "batch_tokens": "16384", "accumulate": "1", "lr": "7e-4",
    "warmup": "2000", "schedule": "cosine",
}  # fmt: skip
GRACE_S = 30  # before the deadline: running commands are asked to stop


def prepare(work, pairs):
    """Write the text, and copy the gold pairs and the text on which speed is measured."""
    data = Path(os.environ["ATTNLAB_DATA"])
    name = "europarl" if pairs <= 160_000 else "europarl-480k"
    text = find_parallel_text(TranslationConfig(data=name, pair="de-en", data_dir=str(data)))
    gold, _ = read_gold_pairs(str(data))
    for part, limit in (("train", pairs), ("valid", 3000)):
        read = text.readers[part]()
        kept = remove_gold(gold, tokenize_pairs((read[0][:limit], read[1][:limit])))
        for side, language in enumerate(LANGUAGES):
            with gzip.open(work / f"{part}.{language}.gz", "wt", encoding="utf-8") as file:
                file.writelines(f"{pair[side]}\n" for pair in kept)
        print(f"{part}: {len(kept):,} pairs")
    shutil.copytree(data / "gold-alignments/de-en", work / "data/gold-alignments/de-en", dirs_exist_ok=True)
    (work / "data/europarl").mkdir(exist_ok=True)
    for language in LANGUAGES:
        shutil.copy(data / f"europarl/en-de.test.{language}.gz", work / "data/europarl")


def list_commands(given):
    """Return (name, file that exists when it is done, its commands, which run at once) of each stage."""
    work, attnlab = given.work, [sys.executable, "-m", "attnlab"]
    text = {language: str(work / f"train.{language}.gz") for language in LANGUAGES}
    translators = []
    for source, target in DIRECTIONS:
        own = {"src": text[source], "tgt": text[target], "pair": f"{source}-{target}", "steps": str(given.steps)}
        own |= {"valid_src": str(work / f"valid.{source}.gz"), "valid_tgt": str(work / f"valid.{target}.gz")}
        own |= dict.fromkeys(("evaluate_every", "checkpoint_every"), str(max(given.steps // 10, 1)))
        settings = SETTINGS | own | dict(each.split("=", 1) for each in given.set)
        words = [*attnlab, "train", "translation", *(f"{k}={v}" for k, v in settings.items())]
        translators.append([*words, "--out", str(work / f"{source}-{target}"), "--device", given.device])
    stages = [("translators", None, translators)]
    runs = [str(work / f"{source}-{target}") for source, target in DIRECTIONS]
    aligner = work / "aligner"
    words = [*attnlab, "align-train", runs[0], text["de"], text["en"], "--reverse", runs[1], "--out", str(aligner)]
    words += ["--pairs", str(given.train_pairs), "--device", given.device]
    stages.append(("align-train", aligner / "aligner.safetensors", [words]))
    words = [sys.executable, str(HERE / "alignment_readings.py"), "--forward", runs[0], "--backward", runs[1]]
    words += ["--trained", str(aligner), "--gold-pair", "de-en", "--device", given.device, "--pairs", "1000"]
    words += ["--minilm", "", "--resume", "--out", str(given.out), "--about", str(work / "about.json")]
    stages.append(("readings", None, [words]))
    return stages


def run_stage(commands, deadline, environment):
    """Run commands at once, and ask them to stop near the deadline. Return whether all finished."""
    running = [subprocess.Popen(words, env=environment, start_new_session=True) for words in commands]
    try:
        for process in running:
            process.wait(None if deadline is None else max(deadline.end - time.monotonic() - GRACE_S, 0))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
        for process in running:
            process.wait()
        return False
    for process, words in zip(running, commands, strict=True):
        if process.returncode:
            raise SystemExit(f"status {process.returncode}: {' '.join(words)}")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of text, runs and times; name it per machine")
    parser.add_argument("--prepare", action="store_true", help="write the text, and stop")
    parser.add_argument("--pairs", type=int, default=480_000, help="training pairs of --prepare")
    parser.add_argument("--train-pairs", type=int, default=480_000, help="pairs of align-train")
    parser.add_argument("--steps", type=int, default=10_000, help="updates of each translator")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of attnlab train")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--until", help="stop before this: a duration such as 9m, or a clock time")
    parser.add_argument("--out", type=Path, default=Path("results/alignment-readings"))
    given = parser.parse_args()
    given.work = given.work.resolve()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.prepare:
        prepare(given.work, given.pairs)
        return
    deadline = Deadline.parse_optional(given.until)
    times = given.work / "seconds.json"
    seconds = json.loads(times.read_text()) if times.is_file() else {}
    environment = os.environ | {"ATTNLAB_DATA": str(given.work / "data"), "PYTHONUNBUFFERED": "1"}
    for name, made, commands in list_commands(given):
        if (made and made.is_file()) or seconds.get(name, {}).get("done"):
            continue
        for words in commands:
            print(f"{name}: {' '.join(words)}", flush=True)
        before, start = seconds.get(name, {}).get("seconds", 0.0), time.monotonic()
        about = {"seconds_by_stage": {stage: value["seconds"] for stage, value in seconds.items()}}
        about["seconds"] = sum(about["seconds_by_stage"].values())
        about |= {"steps": given.steps, "align_train_pairs": given.train_pairs, "settings": SETTINGS, "set": given.set}
        write_text(given.work / "about.json", json.dumps(about))
        done = run_stage(commands, deadline, environment)
        seconds[name] = {"seconds": before + time.monotonic() - start, "done": done}
        write_text(times, json.dumps(seconds, indent=1))
        if not done:
            print(f"stopped in {name}; the same command continues")
            return
    total = sum(each["seconds"] for each in seconds.values())
    print(f"total: {total:,.0f} s; " + ", ".join(f"{name} {each['seconds']:,.0f} s" for name, each in seconds.items()))


if __name__ == "__main__":
    main()
