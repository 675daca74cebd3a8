"""Exported models: transformers loads them with the same logits and tokens; what cannot be expressed is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers as hf
from in_process import run_attnlab
from representatives import REPRESENTATIVES
from small_models import CLASSIFIER, LM, TRANSLATOR

from attnlab.huggingface.conversion import check_logits, plan_installation, write_model
from attnlab.huggingface.pretrained import load
from attnlab.huggingface.skeletons import find_skeleton
from attnlab.huggingface.tokenizer_files import write_tokenizer
from attnlab.mechanisms import MECHANISMS, Mechanism
from attnlab.models.transformer import build
from attnlab.reading.maps import build_view
from attnlab.reading.reader import open_reader
from attnlab.reading.text_stream import TextExample
from attnlab.tasks.language import Language, LanguageConfig
from attnlab.tasks.translation import Translation, TranslationConfig
from attnlab.training.runs import open_run

POST = {"norm": "post", "final_norm": False}
MODERN = {
    "positions": "rope", "norm_type": "rms", "norm_epsilon": 1e-6, "activation": "swiglu", "attention_bias": False,
    "feed_forward_bias": False, "embedding_scale": False, "head_dim": 8, "heads": 4, "key_value_heads": 2,
}  # fmt: skip
LANGUAGE, QWEN3, POST_NORM = (
    replace(LM, **MODERN), replace(LM, **MODERN, query_key_norm=True), replace(TRANSLATOR, **POST)
)  # fmt: skip
TRAIN = ["width=16", "layers=1", "steps=2", "warmup=1", "batch_tokens=256", "device=cpu"]
LINES = [f"the {a} cat {b} the old mat of {a}" for a in ("grey", "small", "red") for b in ("sees", "hears")] * 13


def make_model(config):
    model = build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write(config, folder):
    """Write a random model, and return it with the logits' largest difference."""
    model = make_model(config)
    return model, write_model(model, find_skeleton(config, 64), plan_installation(config), folder)


# models


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LANGUAGE, hf.LlamaForCausalLM),
        (replace(LANGUAGE, tie="none", residual_scale=0.5, attention_bias=True), hf.LlamaForCausalLM),
        (replace(LANGUAGE, padding=5), hf.LlamaForCausalLM),
        (replace(LANGUAGE, rope_scaling="llama3", rope_factor=4.0, rope_length=8), hf.LlamaForCausalLM),
        (QWEN3, hf.Qwen3ForCausalLM),
    ],
)
def test_language_models_load_in_transformers(config, kind, tmp_path):
    model, error = write(config, tmp_path / "out")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs) is kind
    assert error < 1e-5
    tokens = torch.randint(1, 23, (2, 41))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, model(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "pre", "final_norm": True, "target_vocabulary": None},
        {"norm": "pre", "final_norm": True, "target_vocabulary": None, "tie": "all", "activation": "gelu"},
        {"tie": "none", "activation": "gelu", "decoder_layers": 1, "residual_scale": 0.5},
        {"tie": "all", "target_vocabulary": None, "positions": "learned", "max_length": 31},
        {"positions": "none", "attention_bias": False, "embedding_scale": False},
    ],
    ids=str,
)
def test_translators_load_in_transformers(changes, tmp_path):
    model, error = write(replace(POST_NORM, **changes), tmp_path / "out")
    theirs = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is (hf.PegasusForConditionalGeneration if "norm" in changes else hf.MarianMTModel)
    assert error < 1e-5
    source, target = torch.randint(1, 19, (2, 29)), torch.randint(1, 19, (2, 23))
    source[1, 17:] = 0
    with torch.no_grad():
        logits = theirs(input_ids=source, attention_mask=source != 0, decoder_input_ids=target).logits
        torch.testing.assert_close(logits, model(source, target), rtol=0, atol=1e-5)


def test_a_translator_decodes_as_ours_does(tmp_path):
    model, _ = write(POST_NORM, tmp_path / "out")
    theirs = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    source = torch.randint(4, 19, (2, 7))
    decoded = theirs.generate(source, num_beams=1, max_new_tokens=9, eos_token_id=None)
    target = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(9):
            logits = model(source, target)[:, -1:]
            logits[..., :2] = -torch.inf  # neither <pad> nor <s>
            target = torch.cat([target, logits.argmax(-1)], dim=1)
    assert torch.equal(decoded, target)


WIDER = [name for name, kind in MECHANISMS.items() if kind.query_heads is not Mechanism.query_heads]
OTHERS = [(name, POST_NORM) for name in (*REPRESENTATIVES, *WIDER) if name != "softmax"]
OTHERS += [(name, QWEN3) for name, _ in OTHERS if MECHANISMS[name].head_parts == 1]  # the others are refused below


@pytest.mark.parametrize(("name", "config"), OTHERS, ids=[f"{name}-{config.model}" for name, config in OTHERS])
def test_other_attentions_load_in_attnlab(name, config, tmp_path):
    cross = {"cross_attention": "softmax"} if config is POST_NORM and MECHANISMS[name].self_only else {}
    _, error = write(replace(config, attention=name, **cross), tmp_path / "out")
    assert error < 1e-5
    assert json.loads((tmp_path / "out" / "attnlab.json").read_text())["attention"] == name


def test_layers_may_have_different_attentions(tmp_path):
    _, error = write(replace(QWEN3, layers=3, attention="softmax,dagpam,softmax"), tmp_path / "out")
    assert error < 1e-5


def test_cross_attention_may_stay_softmax(tmp_path):
    config = replace(POST_NORM, attention="shaped", cross_attention="softmax")
    _, error = write(config, tmp_path / "out")
    assert error < 1e-5
    assert not any("encoder_attn.attnlab" in name for name, _ in load(tmp_path / "out").named_modules())


def test_the_proof_can_fail(tmp_path):
    model, _ = write(QWEN3, tmp_path / "out")
    with torch.no_grad():
        model.decoder.blocks[1].attention.key_norm.weight[3] += 0.1
    with pytest.raises(ValueError, match="differ"):
        check_logits(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "keyword"),
    [
        (LM, "norm_type=layer, positions=sinusoidal"),
        (replace(LANGUAGE, logit_cap=30.0), "logit_cap=30"),
        (replace(LANGUAGE, embedding_scale=True), "embedding_scale=true"),
        (replace(QWEN3, feed_forward_bias=True), "feed_forward_bias"),
        (replace(LANGUAGE, heads=5, key_value_heads=1), "heads=5"),
        (replace(LANGUAGE, attention="differential"), "differential"),
        (replace(LANGUAGE, attention_options={"scale": 0.5}), "scale=0.5"),
        (replace(LANGUAGE, attention="gated(per=head, scale=0.3)"), "with scale=0.3"),
        (TRANSLATOR, r"no second vocabulary \(source 23 words, target 19\)"),
        (replace(TRANSLATOR, norm="post"), "final_norm=true"),
        (replace(POST_NORM, key_value_heads=1), "key_value_heads=1"),
        (replace(POST_NORM, head_dim=5), "head_dim=5"),
        (replace(POST_NORM, positions="rope"), "positions=rope"),
        (replace(POST_NORM, attention="coda", cross_attention="sigmoid"), "coda and sigmoid"),
        (CLASSIFIER, "classifier.*pool=mean"),
        (replace(CLASSIFIER, pool="first"), "pool=first"),
    ],
)
def test_what_cannot_be_expressed_is_named(config, keyword):
    def plan():
        return find_skeleton(config, 64), plan_installation(config)

    with pytest.raises(ValueError, match=keyword):
        plan()


# tokenizers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("\n".join(LINES) + "\n")
    (folder / "b.txt").write_text("\n".join(line[::-1] for line in LINES) + "\n")
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {"units": "character"}, {"units": "byte"}, {"units": "word"}, {"units": "word", "lower": True},
        {"units": "subword"}, {"units": "subword", "subwords": "bpe"},
    ],
    ids=str,
)  # fmt: skip
def test_tokenizers_of_language_models(keys, text, tmp_path):
    (tmp_path / "run").mkdir()
    task = Language(LanguageConfig(data=str(text / "a.txt"), **keys), tmp_path / "run")
    write(LANGUAGE, tmp_path / "out")
    assert write_tokenizer(task, tmp_path / "out") == ""
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    for line in ("the old cat", "a Ümlaut: the  grey mat ½"):
        assert tokenizer(line)["input_ids"] == task.encode([line]).ids.tolist()
    assert tokenizer.decode(tokenizer("the old cat")["input_ids"], skip_special_tokens=True) == "the old cat"


def test_the_ids_of_a_pretrained_tokenizer_are_shifted(text, tmp_path):
    for name in ("run", "bert"):
        (tmp_path / name).mkdir()
    words = ["[UNK]", "[CLS]", "</s>", "the", "old", "cat", "##s"]
    bert = hf.BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    bert.save_pretrained(tmp_path / "bert")
    task = Language(LanguageConfig(data=str(text / "a.txt"), tokenizer=str(tmp_path / "bert")), tmp_path / "run")
    write(LANGUAGE, tmp_path / "out")
    assert write_tokenizer(task, tmp_path / "out") == ""
    ids = hf.AutoTokenizer.from_pretrained(tmp_path / "out")("the old cats")["input_ids"]
    assert ids == task.encode(["the old cats"]).ids.tolist() == [2, 7, 8, 9, 10]


@pytest.mark.parametrize("keys", [{}, {"joint": False, "subwords": "bpe"}, {"units": "word"}], ids=str)
def test_tokenizers_of_translators(keys, text, tmp_path):
    (tmp_path / "run").mkdir()
    sides = {"src": str(text / "a.txt"), "tgt": str(text / "b.txt")}
    task = Translation(TranslationConfig(**sides, **keys), tmp_path / "run")
    write(POST_NORM, tmp_path / "out")
    assert write_tokenizer(task, tmp_path / "out") == ""
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    line = "the old grey cat"
    assert tokenizer(line)["input_ids"] == task.encode([line]).ids.tolist()
    target = tokenizer(text_target=line[::-1])["input_ids"]
    assert target == [*task.encode_target([line[::-1]]).ids.tolist()[1:], 2]
    assert tokenizer.decode(target, skip_special_tokens=True) == line[::-1]


@pytest.mark.parametrize(
    ("keys", "reason"), [({"moses": True, "pair": "en-de"}, "moses"), ({"units": "word", "joint": False}, "different")]
)
def test_why_there_is_no_tokenizer(keys, reason, text, tmp_path):
    (tmp_path / "run").mkdir()
    sides = {"src": str(text / "a.txt"), "tgt": str(text / "b.txt")}
    task = Translation(TranslationConfig(**sides, **keys), tmp_path / "run")
    write(POST_NORM, tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert reason in write_tokenizer(task, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


# the command


@pytest.fixture(scope="module")
def runs(text):
    commands = {
        "language": ["language", "data=a.txt", "units=word", "block=16", "model=modern-25m", "head_dim=8"],
        "translation": [
            "translation",
            "src=a.txt",
            "tgt=b.txt",
            "units=word",
            "joint=true",
            "model=iwslt14",
            "accumulate=1",
        ],
        "lstm": ["synthetic", "data=permutation", "model=lstm"],
    }
    for name, words in commands.items():
        done = run_attnlab("train", *words, *TRAIN, f"out=runs/{name}", cwd=text)
        assert done.returncode == 0, done.stderr
    return text


@pytest.mark.parametrize("name", ["language", "translation"])
def test_a_run_is_exported(name, runs, monkeypatch):
    done = run_attnlab("export", f"runs/{name}", "--to", "huggingface", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert "transformers" in done.stdout
    monkeypatch.chdir(runs)
    run, auto = open_run(f"runs/{name}", device="cpu"), hf.AutoModelForSeq2SeqLM
    theirs = (hf.AutoModelForCausalLM if name == "language" else auto).from_pretrained(f"exported/{name}").eval()
    ids = hf.AutoTokenizer.from_pretrained(f"exported/{name}")(LINES[0], return_tensors="pt")["input_ids"]
    given = {"input_ids": ids} if name == "language" else {"input_ids": ids, "decoder_input_ids": ids}
    with torch.no_grad():
        torch.testing.assert_close(theirs(**given).logits, run.model(*given.values()), rtol=0, atol=1e-5)


def test_a_modern_run_is_read_by_weights_and_norms(runs, monkeypatch):
    monkeypatch.chdir(runs)
    reader = open_reader("runs/language", device="cpu")
    recorded = reader.record([TextExample(LINES[0])])
    assert [layer.strange for layer in recorded.layers] == [""]
    shown = build_view(recorded).runs[0].frames[0].attentions
    assert {"weight", "norm-block"} <= {name for attention in shown for name in attention.maps}
    assert reader.predict(TextExample(LINES[0]))


@pytest.mark.parametrize(
    ("words", "keyword"),
    [
        (["runs/language", "--to", "onnx"], "huggingface"),
        (["runs/language", "weights=worst"], "weights"),
        (["runs/nothing"], "no run"),
        (["runs/lstm"], "LSTM"),
        (["runs/language", "--out", "full"], "empty"),
        (["runs/language", "--out", "a.txt"], "empty"),
        (["runs/own"], "mine.py"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_and_writes_nothing(words, keyword, runs):
    (runs / "full").mkdir(exist_ok=True)
    (runs / "full" / "file").write_text("")
    shutil.copytree(runs / "runs" / "language", runs / "runs" / "own", dirs_exist_ok=True)
    values = json.loads((runs / "runs" / "own" / "model.json").read_text()) | {"attention": "./mine.py:Mine"}
    (runs / "runs" / "own" / "model.json").write_text(json.dumps(values))
    before = sorted(runs.rglob("*"))
    done = run_attnlab("export", *words, *([] if "--out" in words else ["--out", "refused/out"]), cwd=runs)
    assert done.returncode == 2
    assert keyword in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(runs.rglob("*")) == before
