"""Time several programs in turns, each in its own process, so that other load on the machine affects all of them alike.

A program describes itself in its first line, then answers every question with the processor time of its steps:

    writes    {"parameters": 39469056, "version": "torch 2.13.0"}
    reads     {"tokens": 512, "steps": 1}
    writes    {"seconds": 1.83, "loss": 8.91}

This module needs only Python, so that each program can run in its own environment.
"""

import json
import math
import os
import subprocess
import sys
import time


def serve_steps(about, step_of):
    """Be such a program. step_of(tokens, steps) returns a function that runs the steps and returns loss per token."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        step = step_of(**json.loads(line))
        start = time.process_time()
        loss = step()
        print(json.dumps({"seconds": time.process_time() - start, "loss": loss}), flush=True)


class Program:
    """A started program: a process with one thread that answers questions."""

    def __init__(self, name, command):
        self.name = name
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=one_thread
        )
        self.about = self._read_line()

    def ask(self, **question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._read_line()

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def _read_line(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}; its error is printed above")
        return json.loads(line)


def time_in_turns(commands, questions, rounds):
    """Ask every program every question, in turns, after one warm-up turn.

    commands: by name. Returns the programs' descriptions by name, and the seconds of all rounds by (name, index of the
    question). Raises ValueError if a loss is not finite or does not fall, because such a program does not train.
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
            raise ValueError(f"{name} does not train: its loss went from {first:.4g} to {last:.4g}, {questions[place]}")
    seconds = {key: [each["seconds"] for each in given[1:]] for key, given in answers.items()}
    return {program.name: program.about for program in programs}, seconds
