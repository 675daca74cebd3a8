"""Every command takes key=value and --options, each in either spelling."""

import shlex
from importlib import import_module

import pytest
import typer
from in_process import run_attnlab
from typer.core import TyperGroup, TyperOption

from attnlab.cli import app
from attnlab.commands.compare.plan import plan_comparison
from attnlab.commands.demo.settings import DemoConfig
from attnlab.commands.examples import EXAMPLES
from attnlab.config import parse_values, replace_values, split_pairs
from attnlab.mechanisms import parse_options
from attnlab.models.presets import configure_model
from attnlab.terminal.spelling import SETTINGS
from attnlab.training.recipe import resolve_recipe

ROOT = typer.main.get_command(app)
CONTEXT = ROOT.make_context("attnlab", ["list"])
GROUPS = {"": ROOT} | {f"{name} ": group for name, group in ROOT.commands.items() if isinstance(group, TyperGroup)}
COMMANDS = {
    prefix + name: (group, command)
    for prefix, group in GROUPS.items()
    for name, command in group.commands.items()
    if not isinstance(command, TyperGroup)
}
OPTIONS = [
    (name, option)
    for name, (_, command) in COMMANDS.items()
    for option in command.params
    if isinstance(option, TyperOption)
]


def parse(name, *words):
    """Return the parameters of a command, without a check of what is missing."""
    group, command = COMMANDS[name]
    words = group.resolve_command(CONTEXT, [command.name, *words])[2]
    return command.make_context(command.name, words, resilient_parsing=True).params


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{name} {option.name}" for name, option in OPTIONS])
def test_an_option_may_be_written_as_key_value(name, option):
    flag = option.opts[0]
    key = flag.removeprefix("--").replace("-", "_")
    default = parse(name)[option.name]
    if option.is_flag:
        assert parse(name, f"{key}=true")[option.name] is parse(name, flag)[option.name] is True
        assert not parse(name, f"{key}=false")[option.name]
    elif option.nargs != 1:
        assert parse(name, flag, "a", "b=c")[option.name] == ("a", "b=c")
        with pytest.raises(ValueError, match=flag):
            parse(name, f"{key}=a")
    else:
        given = parse(name, f"{key}=7")[option.name]
        assert given == parse(name, flag, "7")[option.name] == parse(name, f"{flag}=7")[option.name] != default


SETTING = [name for name, (_, command) in COMMANDS.items() if any(p.name == SETTINGS for p in command.params)]


@pytest.mark.parametrize("name", SETTING)
def test_a_key_may_be_written_as_an_option(name):
    _, command = COMMANDS[name]
    before = ["x"] * [p.name for p in command.params].index(SETTINGS)
    for words in (
        ["key_a=3", "b=true", "c=false"],
        ["--key-a", "3", "--b", "--no-c"],
        ["--key_a=3", "--b=true", "c=false"],
    ):
        assert parse(name, *before, *words)[SETTINGS] == ["key_a=3", "b=true", "c=false"]
    assert parse(name, *before, "--lr", "-1", "--b", "--", "--c")[SETTINGS] == ["lr=-1", "b=true", "--c"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_two_examples_that_its_options_and_keys_allow(name):
    group, command = COMMANDS[name]
    assert len(EXAMPLES[name]) == 2
    for example in EXAMPLES[name]:
        assert example in command.epilog
        words = shlex.split(example.split(" <")[0].split(" >")[0])
        assert words[: 1 + len(name.split())] == ["attnlab", *name.split()]
        words = group.resolve_command(CONTEXT, words[len(name.split()) :])[2]
        params = command.make_context(command.name, words).params
        pairs = split_pairs(params.get(SETTINGS) or [])
        pairs = {key: text.replace("./mine.py:Mine", "softmax1") for key, text in pairs.items()}
        if name == "train":
            resolve_recipe(params["task"], pairs)
        elif name == "compare":
            plan_comparison(params["task"], {**pairs, "attention": pairs.get("attention", "softmax")})
        elif name == "describe":
            configure_model(params["model"], pairs)
        elif name == "demo":
            replace_values(DemoConfig(), pairs)
        elif name == "check":
            parse_options(params["mechanism"].replace("./mine.py:Mine", "softmax"), pairs)
        elif name in ("evaluate", "translate", "predict"):
            parse_values(pairs, import_module(f"attnlab.commands.{name}").TYPES)


def test_no_example_is_of_a_command_that_does_not_exist():
    assert set(EXAMPLES) == set(COMMANDS)


def test_the_value_of_an_option_is_left_as_it_is():
    assert parse("inspect", "m", "--text", "layers=3")["text"] == "layers=3"
    assert parse("inspect", "m", "--text", "layers=3")["layers"] is None
    assert parse("reproduce", "x", "only=a,b")["only"] == parse("reproduce", "x", "--only=a", "--only", "b")["only"]


def test_both_spellings_train_the_same_run(tmp_path):
    small = ("width=16", "layers=1", "heads=2", "feed_forward=16", "examples=20", "held_out=5", "batch_examples=5")
    done = run_attnlab("train", "synthetic", *small, "--steps", "2", "--attention=cog", "out=one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = run_attnlab("train", "synthetic", *small, "steps=2", "attention=cog", "--out", "one", cwd=tmp_path)
    assert "finished at step 2" in again.stdout


@pytest.mark.parametrize(
    ("words", "keyword"),
    [
        (["train", "synthetic", "out=a", "--out", "b"], "twice"),
        (["train", "synthetic", "steps=1", "--steps", "2"], "twice"),
        (["train", "synthetic", "--stesp", "2"], "did you mean 'steps'"),
        (["compare", "synthetic", "controls=maybe"], "true or false"),
        (["demo", "seeds=x"], "whole number"),
        (["inspect", "m", "layer=3"], "did you mean 'layers'"),
    ],
)
def test_a_wrong_spelling_is_one_line(words, keyword):
    done = run_attnlab(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert keyword in done.stderr
