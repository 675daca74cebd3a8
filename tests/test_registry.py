"""Registries import what is looked up; what is read from the source equals what is imported."""

import pytest
from in_process import run_attnlab

from attnlab.mechanisms import MECHANISMS, Mechanism, read_option_types
from attnlab.mechanisms.softmax import Softmax
from attnlab.registry import Registry
from attnlab.registry.module_source import list_options, open_source
from attnlab.studies import STUDIES, open_study, outline_study
from attnlab.tasks import TASKS
from attnlab.training.key_notes import list_keys, read_notes, write_value
from attnlab.training.recipe import PARTS, resolve_recipe


def test_a_registry_is_a_mapping_of_names_to_objects():
    registry = Registry({"one": "attnlab.mechanisms.softmax:Softmax", "two": Mechanism})
    assert dict(registry) == {"one": Softmax, "two": Mechanism}
    assert list(registry.values()) == [Softmax, Mechanism]
    assert registry.get("three") is None
    assert registry.get_place("two") == "attnlab.mechanisms.mechanism:Mechanism"
    registry["three"] = Softmax
    assert (registry | {"four": Softmax})["one"] is registry["three"]
    with pytest.raises(KeyError):
        registry["five"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_options_read_from_the_source_are_those_of_the_class(name):
    assert issubclass(MECHANISMS[name], Mechanism)
    assert list_options(MECHANISMS.get_place(name)) == list(read_option_types(name))


@pytest.mark.parametrize("task", TASKS)
def test_keys_read_from_the_source_are_those_of_the_recipe(task):
    recipe = resolve_recipe(task, {})
    keys = list_keys(task)
    for key in keys:
        value = getattr(getattr(recipe, key.part), key.name)
        assert key.default in (value, None), key  # None may be resolved with the other keys
    names = {name for part in PARTS for name in vars(getattr(recipe, part)) if not name.endswith("_options")}
    from_task = set(open_source("attnlab.training.recipe").get_value("FROM_TASK"))
    assert {key.name for key in keys} | from_task >= names


@pytest.mark.parametrize("task", TASKS)
def test_every_key_is_explained_in_a_sentence_with_its_values_and_default(task):
    shown = " ".join(run_attnlab("list", task).stdout.split())
    for key in list_keys(task):
        assert len(key.sentence.split()) > 2, f"write a comment behind {key.name}"
        assert f"{key.name}={write_value(key.default)} " in shown
        for choice in key.choices:
            assert choice in key.values


CONFIGS = ["attnlab.models.lstm_config:LSTMConfig", "attnlab.commands.demo.settings:DemoConfig"]


@pytest.mark.parametrize("place", CONFIGS)
def test_other_configurations_are_explained_too(place):
    for note in read_notes(place, ""):
        assert note.sentence or note.name.endswith("_options"), f"write a comment behind {note.name}"


@pytest.mark.parametrize("name", STUDIES)
def test_the_outline_of_a_study_is_that_of_the_study(name):
    study, outline = open_study(name), outline_study(name)
    assert (outline.title, list(outline.items)) == (study.title, list(study.items))
    assert outline.items == {item: each.title for item, each in study.items.items()}
