"""The public names: what help, dir and an editor show of them."""

import inspect

import pytest
import torch
from typed_use import use_mechanisms, use_records

import attnlab
from attnlab.huggingface import pretrained
from attnlab.models.presets import PRESETS, build
from attnlab.reading.maps import build_view


def test_typed_use_runs():
    use_mechanisms()
    use_records(build(PRESETS["tiny"]).eval(), torch.randint(1, 256, (1, 5)))


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(attnlab) == sorted([*attnlab.__all__, "__version__"])


@pytest.mark.parametrize(("name", "whole"), [("record", pretrained.record), ("show", build_view)])
def test_a_signature_has_every_option_with_its_default(name, whole):
    shown = inspect.signature(getattr(attnlab, name)).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in shown.values())
    for option in inspect.signature(whole).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            assert shown[option.name].default == option.default
            assert option.name in getattr(attnlab, name).__doc__, option


@pytest.mark.parametrize("name", [name for name in attnlab.__all__ if name != "MECHANISMS"])
def test_every_public_name_is_documented_and_typed(name):
    public = getattr(attnlab, name)
    assert inspect.getdoc(public)
    if inspect.isfunction(public):
        for option in inspect.signature(public).parameters.values():
            assert option.annotation is not option.empty, option


def test_an_option_for_hugging_face_models_is_refused_for_ours():
    with pytest.raises(TypeError, match="max_length"):
        attnlab.record(build(PRESETS["tiny"]).eval(), torch.tensor([[3, 4]]), max_length=3)
