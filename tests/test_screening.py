"""Hugging Face models that hide code in their config or among their weights, and a hub that does not answer."""

import json
import pickle
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
import torch
from in_process import run_attnlab

from attnlab.huggingface import pretrained
from attnlab.huggingface.screening import check_config
from attnlab.tasks import hub


class Evil:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def model(tmp_path):
    """A model whose safetensors weights are replaced by a pickle, beside it and above it, with an index to name one."""
    folder = tmp_path / "model"
    tiny_models.bert().save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "good.safetensors")
    for place in (folder, tmp_path):
        for name in ("evil.bin", "evil.safetensors.bin", "model.SAFETENSORS", "adapter_model.bin"):
            (place / name).write_bytes(pickle.dumps(Evil(tmp_path / "was-run")))
    return folder


def write_index(folder, name, file="model.safetensors.index.json"):
    names = tiny_models.bert().state_dict()
    (folder / file).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, name)}))


def edit_config(folder, **values):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refuse_load(*_arguments, **_options):
    raise AssertionError("torch.load was reached")


@pytest.mark.parametrize(
    "name", ["evil.bin", "../evil.bin", "{}/evil.bin", "evil.safetensors.bin", "sub/x.safetensors", "../x.safetensors",
             "model.SAFETENSORS", "..\\x.safetensors", "", 3, None]
)  # fmt: skip
def test_an_index_names_only_safetensors_files_beside_it(model, name, monkeypatch):
    monkeypatch.setattr(torch, "load", refuse_load)
    write_index(model, name.format(model.parent) if isinstance(name, str) else name)
    with pytest.raises(ValueError, match=r"index\.json.*allow_pickle"):
        pretrained.open_model(str(model))
    assert not (model.parent / "was-run").exists()


def test_a_sound_index_is_read(model):
    write_index(model, "good.safetensors")
    assert pretrained.open_model(str(model)).config.model_type == "bert"


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}', "[" * 10**5])
def test_a_damaged_index_is_named(model, text):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json") as caught:
        pretrained.open_model(str(model))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["adapter_model.bin", "../evil.bin", "evil.safetensors.index.json", 3, ["x"]])
def test_a_config_names_only_safetensors_files_beside_it(model, name, monkeypatch):
    monkeypatch.setattr(torch, "load", refuse_load)
    write_index(model, "evil.bin", "evil.safetensors.index.json")
    edit_config(model, transformers_weights=name)
    with pytest.raises(ValueError, match=r"allow_pickle|config\.json"):
        pretrained.open_model(str(model))
    assert not (model.parent / "was-run").exists()


def test_a_link_to_a_pickle_is_not_unpickled(model):
    (model / "model.safetensors").symlink_to(model / "evil.bin")
    with pytest.raises(OSError, match="weights"):
        pretrained.open_model(str(model))
    assert not (model.parent / "was-run").exists()


def test_whatever_way_leads_to_torch_load_is_closed(model, monkeypatch):
    """As a model class that loads more than its weights."""
    write_index(model, "good.safetensors")
    monkeypatch.setattr(
        pretrained.transformers.BertModel,
        "from_pretrained",
        classmethod(lambda cls, *given, **options: torch.load(model / "evil.bin", weights_only=False)),
    )
    with pytest.raises(ValueError, match="allow_pickle"):
        pretrained.open_model(str(model))
    assert torch.load.__module__ == "torch.serialization"
    assert not (model.parent / "was-run").exists()


KERNEL = "owner/kernel"


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"_attn_implementation_internal": KERNEL},
        {"attn_implementation": "paged|owner/kernel@main:attend"},
        {"attn_implementation": {"": "eager", "text_config": KERNEL}},
        {"attn_implementation": [KERNEL]},
        {"text_config": {"attn_implementation": KERNEL}},
        {"text_config": [{"deep": {"_attn_implementation": KERNEL}}]},
        {"experts_implementation": "deepgemm"},
        {"attn_implementation": "flash_attention_2"},
        {"vision_config": {"auto_map": {"AutoModel": "evil.Evil"}}},
    ],
)
def test_a_config_that_names_code_is_refused(values):
    with pytest.raises(ValueError, match=r"attn_implementation|experts_implementation|trust_remote_code"):
        check_config({"model_type": "bert", **values}, "model", trust_remote_code=False)


@pytest.mark.parametrize("value", [None, "eager", "sdpa", False, {"": "sdpa"}])
def test_a_plain_implementation_is_allowed(value):
    check_config({"text_config": {"attn_implementation": value}}, "model", trust_remote_code=False)


def test_a_kernel_is_refused_before_the_model_is_built(model, monkeypatch):
    write_index(model, "good.safetensors")
    edit_config(model, attn_implementation=KERNEL)
    monkeypatch.setattr(pretrained.transformers.BertModel, "from_pretrained", refuse_load)
    done = run_attnlab("inspect", model, "--text", "the cat")
    assert done.returncode == 2
    assert KERNEL in done.stderr
    assert done.stderr.count("\n") == 1


def test_code_of_the_model_is_not_run_for_a_known_type(model, tmp_path):
    """Where transformers has no class for AutoModel, it would ask on standard input and wait."""
    write_index(model, "good.safetensors")
    (model / "evil.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    edit_config(model, auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}, architectures=["Evil"])
    pretrained.open_model(str(model))
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "named", [None, [], "BertModel", 3, True, {}, [3], [None], ["Nope"], ["pipeline"], ["AutoTokenizer"], ["__file__"],
              ["PreTrainedModel"], ["GPT2LMHeadModel"], ["Trainer"], [""], ["torch"], ["BertConfig"], ["BertTokenizer"]]
)  # fmt: skip
def test_odd_architectures_are_one_line_or_none(model, named):
    write_index(model, "good.safetensors")
    edit_config(model, architectures=named)
    done = run_attnlab("inspect", model, "--text", "the cat", cwd=model.parent)
    assert done.returncode == 2  # at the latest because there is no tokenizer
    assert str(model) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("values", [{"num_attention_heads": 0}, {"num_attention_heads": 4}, {"hidden_size": "x"},
                                    {"hidden_size": 30}, {"vocab_size": None}])  # fmt: skip
def test_a_config_that_does_not_fit_is_one_line(model, values):
    write_index(model, "good.safetensors")
    edit_config(model, **values)
    with pytest.raises((ValueError, OSError)) as caught:
        pretrained.open_model(str(model))
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


@contextmanager
def silent_hub(monkeypatch):
    """A hub that accepts connections and says nothing; yields the list of them."""
    from huggingface_hub import close_session, constants

    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    connections.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "LIMIT_S", 0.2)
        close_session()
        yield connections
        close_session()
    for connection in connections:
        connection.close()


def test_a_silent_hub_is_asked_once(monkeypatch, tmp_path):
    with silent_hub(monkeypatch) as connections:
        done = run_attnlab("inspect", "nobody/nothing", "--text", "the cat", cwd=tmp_path)
        (tmp_path / "text.txt").write_text("the cat\n" * 99)
        again = run_attnlab("train", "language", "model=nobody/nothing", "data=text.txt", "device=cpu", cwd=tmp_path)
    assert (done.returncode, again.returncode) == (2, 2)
    assert "folder" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "tokenizer" in again.stderr
    assert len(connections) == 1


def test_the_bundled_model_is_offered(monkeypatch):
    folder = tiny_models.minilm()
    with pytest.raises(FileNotFoundError, match="bundled") as caught:
        pretrained.open_model("nobody/nothing")
    assert folder in str(caught.value)


@pytest.mark.parametrize("name", ["./missing", "missing/", "/missing/model", "~/missing", "a/b/c"])
def test_a_folder_that_does_not_exist_is_not_asked_for(name, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "is_hub_reachable", refuse_load)
    done = run_attnlab("train", "language", f"model={name}", "data=synthetic", cwd=tmp_path)
    assert done.returncode == 2
    assert "no such folder" in done.stderr
    done = run_attnlab("train", "language", f"tokenizer={name}", f"data={__file__}", cwd=tmp_path)
    assert done.returncode == 2
    assert "no such folder" in done.stderr
