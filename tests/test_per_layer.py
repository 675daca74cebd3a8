"""Different attentions in the layers of one model: one text, the same everywhere, and one line on what is wrong."""

import json

import pytest
import tiny_models
import torch
from in_process import run_attnlab

import attnlab
from attnlab.commands.compare.plan import plan_comparison
from attnlab.config import compute_digest
from attnlab.mechanisms import choose_attentions
from attnlab.mechanisms.per_layer import describe_layers, is_per_layer, list_names, replace_names, split_layers
from attnlab.models.presets import PRESETS, build
from attnlab.models.transformer_config import TransformerConfig
from attnlab.recording.watch import record
from attnlab.training import runs
from attnlab.training.recipe import resolve_recipe
from attnlab.training.run_list import list_runs

SMALL = {"data": "lexicon", "examples": "60", "held_out": "20", "layers": "2", "width": "8", "heads": "2"}
SMALL |= {"feed_forward": "8", "steps": "2", "batch_examples": "4", "compile": "no"}
MINE = "from attnlab.mechanisms import Softmax\n\nclass Mine(Softmax):\n    pass\n"


def name_layers(text, layers):
    return [one.name for one in split_layers(text, layers)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("softmax", ["softmax"] * 4),
        ("softmax*3,dagpam", ["softmax"] * 3 + ["dagpam"]),
        ("(softmax*3,dagpam)", ["softmax"] * 3 + ["dagpam"]),
        ("softmax, dagpam", ["softmax", "dagpam"] * 2),
        ("dagpam(initial=0.5)", ["dagpam"] * 4),
        ("softmax * 4", ["softmax"] * 4),
        (" softmax *2 , dagpam( initial = 0.5 ) * 2 ", ["softmax"] * 2 + ["dagpam"] * 2),
        ("{3: coda+dagpam, 0-2: sigmoid}", ["sigmoid"] * 3 + ["coda+dagpam"]),
        ("{0: softmax, 1: dagpam, 2: softmax, 3: dagpam}", ["softmax", "dagpam"] * 2),
        ("./a.py:A*2,./b.py:B*2", ["./a.py:A"] * 2 + ["./b.py:B"] * 2),
    ],
)
def test_each_layer_has_its_attention(text, names):
    assert name_layers(text, 4) == names
    assert set(list_names(text)) == set(names)


def test_blanks_around_an_option_do_not_count():
    assert split_layers("gated( per = head )", 1) == split_layers("gated(per=head)", 1)


def test_a_description_reads_as_the_same():
    chosen = choose_attentions("softmax*2,dagpam(initial=0.5),softmax", {}, 4)
    text = describe_layers(chosen)
    assert text == "{0-1: softmax, 3: softmax, 2: dagpam(initial=0.5)}"
    assert choose_attentions(text, {}, 4) == chosen


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("softmax*3", "1 missing"),
        ("softmax*9", "5 too many"),
        ("{0-2: softmax}", "leaves out layer 3"),
        ("{0: softmax}", "leaves out layers 1-3"),
        ("{0-2: softmax, 2-3: coda}", "twice"),
        ("{0-4: softmax}", "sets layer 4"),
        ("softmax*3,cosa", "did you mean 'coda'"),
        ("softmax*3,dagpam(initial=x)", "initial=x"),
        ("softmax*3,dagpam(scale=-1)", "scale must"),
        ("softmax*3,dagpam(initail=1)", "did you mean 'initial'"),
        ("softmax*3,dagpam(layer=2)", "layer"),
        ("softmax*,dagpam", "number of layers"),
        ("softmax*0,dagpam", "number of layers"),
        ("softmax*99999999999,dagpam", "number of layers"),
        ("softmax,,dagpam", "empty"),
        ("{0-2 softmax}", "LAYERS: NAME"),
        ("{0-3: softmax*4}", "LAYERS: NAME"),
        ("{a: softmax}", "whole numbers"),
        ("{0-3: softmax", "brace"),
        ("(softmax*3,dagpam", "bracket"),
        ("{}", "missing"),
        ("*4", "NAME"),
        ("softmax*2,realformer*2", "carry"),
        ("realformer,softmax*2,realformer", "carry"),
        ("coda(alpha=2)*2,coda(alpha=4)*2", "carry"),
        ("realformer*2,coda*2", "carry"),
        ("realformer,softmax*3", "carry"),
        ("{0: resformer, 1-3: softmax}", "carry"),
    ],
)
def test_what_is_wrong_is_one_line(text, keyword):
    done = run_attnlab("describe", "tiny", "layers=4", f"attention={text}")
    assert done.returncode == 2
    assert done.stderr.startswith("attnlab: ")
    assert done.stderr.count("\n") == 1
    assert keyword in done.stderr


def test_describe_shows_the_attention_of_each_layer():
    done = run_attnlab("describe", "iwslt14", "attention=softmax*2,dagpam", "cross_attention=softmax")
    assert "decoder-self: {0-1: softmax, 3-4: softmax, 2: dagpam, 5: dagpam}" in done.stdout
    assert "cross: {0-5: softmax}" in done.stdout
    assert "encoder layer 2: self-attention mechanism" in done.stdout
    assert "encoder layer 1: self-attention mechanism" not in done.stdout


def test_an_option_of_one_attention_is_not_given_to_all():
    with pytest.raises(ValueError, match=r"dagpam\(initial=…\)"):
        resolve_recipe("synthetic", SMALL | {"attention": "softmax,dagpam", "initial": "0.5"})
    model = resolve_recipe("synthetic", SMALL | {"attention": "softmax,dagpam", "impl": "reference"}).model
    assert [options for _, options in model.list_attentions("encoder-self")] == [{"impl": "reference"}] * 2


def test_a_stack_with_fewer_layers_is_named():
    with pytest.raises(ValueError, match="the decoder has 2"):
        TransformerConfig(model="translator", vocabulary=9, layers=3, decoder_layers=2, attention="softmax*2,dagpam")


def test_a_run_is_named_after_its_attentions():
    plain, mixed = (resolve_recipe("synthetic", SMALL | {"attention": text}) for text in ("softmax", "softmax,dagpam"))
    assert plain.name() == f"synthetic-softmax-{compute_digest(plain)}"
    assert plain.values()["model"]["attention"] == "softmax"  # as it was stored before
    assert mixed.name() == f"synthetic-softmax_dagpam-{compute_digest(mixed)}"


def test_a_carry_ends_where_its_attention_ends():
    """Two layers of RealFormer, then softmax: decoding step by step gives the logits of the full pass."""
    sizes = {"layers": 3, "width": 12, "heads": 2, "feed_forward": 16, "vocabulary": 11, "dropout": 0.0}
    config = TransformerConfig(model="language-model", attention="realformer*2,softmax", **sizes)
    model, tokens = build(config).double().eval(), torch.randint(1, 11, (2, 7))
    state = model.start()
    steps = torch.cat([model.step(tokens[:, k : k + 1], state) for k in range(7)], 1)
    torch.testing.assert_close(steps, model(tokens), atol=1e-10, rtol=0)
    assert record(model, (tokens,)).meta["mechanism"] == "realformer, softmax"
    carried = [model.decoder.blocks[k].attention.mechanism.carries for k in range(3)]
    assert carried == [True, True, False]


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_trained_resumed_and_scored(place):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    train = ["train", "synthetic", *words, "attention=softmax,./mine.py:Mine(scale=0.5)", "out=run", "device=cpu"]
    assert run_attnlab(*train).returncode == 0
    again = run_attnlab(*[word.replace("steps=2", "steps=3") for word in train])
    assert "continues" in again.stdout + again.stderr
    assert "--allow-code" in run_attnlab("evaluate", "run", "part=valid", "device=cpu").stderr
    done = run_attnlab("evaluate", "run", "part=valid", "bootstrap=2", "device=cpu", "--allow-code")
    assert done.returncode == 0, done.stderr
    config = json.loads((place / "run" / "config.json").read_text())
    assert list(config["code"]) == ["./mine.py"]
    model = runs.open_run("run", device="cpu", allow_code=True).model
    assert model.encoder.blocks[1].attention.mechanism.scale == 0.5
    (row,) = list_runs(place)
    assert row["attention"] == "softmax,./mine.py:Mine(scale=0.5)"
    (place / "mine.py").write_text(MINE + "# edited\n")
    with pytest.raises(ValueError, match="hash"):
        runs.open_run("run", device="cpu", allow_code=True)


def test_an_adapted_model_has_them_by_layer_and_keeps_them(place):
    model = attnlab.adapt(tiny_models.gpt2(), "{0-1: softmax, 2: ./mine.py:Mine}").eval()
    kinds = [type(part).__name__ for part in model.modules() if isinstance(part, attnlab.Mechanism)]
    assert kinds == ["Softmax", "Softmax", "Mine"]
    model.save_pretrained("saved")
    with pytest.raises(ValueError, match="allow_code"):
        attnlab.load("saved")
    loaded, tokens = attnlab.load("saved", allow_code=True).eval(), torch.randint(3, 20, (1, 7))
    torch.testing.assert_close(loaded(tokens)[0], model(tokens)[0])
    with pytest.raises(ValueError, match="1 missing"):
        attnlab.adapt(tiny_models.gpt2(), "softmax*2")


def test_a_comparison_takes_them_in_brackets():
    rows = ["softmax", "softmax,dagpam(initial=0.5)", "{0: sigmoid, 1: softmax}"]
    plan = plan_comparison("synthetic", SMALL | {"attention": f"{rows[0]},({rows[1]}),{rows[2]}"})
    assert [row.settings["attention"] for row in plan.rows] == rows
    alone = resolve_recipe("synthetic", SMALL | {"attention": "softmax,dagpam(initial=0.5)"})
    assert plan.recipe(plan.rows[1], 0).name() == alone.name()
    with pytest.raises(ValueError, match=r"\(softmax\*1,dagpam\)"):
        plan_comparison("synthetic", SMALL | {"attention": "softmax*1,dagpam"})


def test_the_path_of_a_file_may_have_commas_and_parentheses(place):
    folder = place / "a, (b)"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    assert not is_per_layer(f"{folder}/mine.py:Mine")
    assert is_per_layer(f"{place}/mine.py:Mine*2")
    with pytest.raises(ValueError, match="path"):
        replace_names("softmax,./mine.py:Mine", lambda name: name.replace("./", "./a, b/"))


def test_the_presets_are_of_one_attention():
    assert not any(is_per_layer(config.attention) for config in PRESETS.values())
