"""Programs timed in turns, each a process of its own: on a machine that others use, all then meet the same neighbours.

A program says on its first line what it is, then answers every question with the processor time of its steps:

    it says     {"parameters": 39469056, "version": "torch 2.13.0"}
    it reads    {"tokens": 512, "steps": 1}
    it says     {"seconds": 1.83, "loss": 8.91}

Nothing here needs more than Python, so that a program can run in an environment of its own.
"""

import json
import math
import os
import subprocess
import sys
import time


def answer(about, step_of):
    """Be such a program. step_of(tokens, steps) makes a function that takes the steps and returns the loss a token."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        step = step_of(**json.loads(line))
        start = time.process_time()
        loss = step()
        print(json.dumps({"seconds": time.process_time() - start, "loss": loss}), flush=True)


class Program:
    """The other end: starts the process, on one thread, and asks it."""

    def __init__(self, name, command):
        self.name = name
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=one_thread
        )
        self.about = self._line()

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._line()

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def _line(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}; its own words are above")
        return json.loads(line)


def in_turns(commands, questions, rounds):
    """Ask every program every question, in turns, after one unmeasured turn.

    commands: by name. Returns what each program says of itself, by name, and the seconds of the rounds, by (name, place
    of the question). Refuses a program whose loss is not finite or did not fall: it would be timed doing nothing.
    """
    programs, answers = [], {}
    try:
        for name, command in commands.items():
            programs.append(Program(name, command))
        for _ in range(rounds + 1):
            for place, question in enumerate(questions):
                for program in programs:
                    answers.setdefault((program.name, place), []).append(program.ask(**question))
    finally:
        for program in programs:
            program.close()
    for (name, place), given in answers.items():
        first, last = given[0]["loss"], given[-1]["loss"]
        if not (math.isfinite(last) and last < first):
            raise ValueError(f"{name} does not learn: its loss went from {first:.4g} to {last:.4g}, {questions[place]}")
    seconds = {key: [each["seconds"] for each in given[1:]] for key, given in answers.items()}
    return {program.name: program.about for program in programs}, seconds
