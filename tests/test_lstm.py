"""The LSTM models: their published sizes, their equations transcribed, decoding, recording, many trained at once."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from representatives import CROSS
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnlab.decoding.decode import Pinnable, Session, decode_beam, decode_greedy
from attnlab.decoding.search import Rules
from attnlab.mechanisms import MECHANISMS
from attnlab.models.lstm import LSTMTranslator, build, load_backbone
from attnlab.models.lstm_config import COPY, SETTINGS, TRANSLATION, LSTMConfig
from attnlab.models.lstm_layers import sum_by_word
from attnlab.models.presets import build_on_meta, parameter_table
from attnlab.recording.watch import record

SMALL = replace(TRANSLATION, vocabulary=23, width=5, embedding_width=7, dropout=0.0)
CLASSIFIER = replace(SETTINGS["classification"], vocabulary=23, width=5, embedding_width=7)
close = {"rtol": 0.0, "atol": 1e-10}


def made(config=SMALL, **changes):
    return build(replace(config, **changes)).double().eval()


def batch(examples=3, source=7, target=6):
    x, y = torch.randint(3, 23, (examples, source)), torch.randint(3, 23, (examples, target))
    x[1, 4:], y[2, 3:] = 0, 0
    return x, y


@pytest.mark.parametrize(
    ("config", "with_words", "without"),
    [
        (TRANSLATION, 8_180_544, 6_132_544),
        (COPY, 1_337_130, 1_326_378),
        (replace(COPY, vocabulary=62), 1_347_390, 1_331_518),
        (replace(COPY, vocabulary=82), 1_357_650, 1_336_658),
        *(
            (replace(SETTINGS["classification"], vocabulary=(total - 1_274_882) // 300), total, 1_274_882)
            for total in (19_376_282, 10_594_382, 5_021_282, 4_581_482, 13_685_282, 12_407_882, 2_682_182)
        ),
    ],
)
def test_published_counts(config, with_words, without):
    """Facts of A.8 and of the authors' code: translation, copying of 40, 60, 80 types, the seven classifiers."""
    model = build_on_meta(config)
    assert sum(p.numel() for p in model.parameters()) == with_words
    assert with_words - model.encoder.embedding.words.weight.numel() == without
    assert sum(count for _, count in parameter_table(model)) == with_words


def test_words_of_the_published_classifiers():
    """The vocabularies of Table 9, of which 20 Newsgroups' is a slip there."""
    sizes = {"IMDB": 60338, "AG News": 31065, "20 NG": 12488, "SST": 11022, "Yelp": 41368, "Amzn": 37110, "SMS": 4691}
    totals = [19_376_282, 10_594_382, 5_021_282, 4_581_482, 13_685_282, 12_407_882, 2_682_182]
    assert [300 * words + 1_274_882 for words in sizes.values()] == totals


def test_parameters_by_block():
    table = dict(parameter_table(build_on_meta(TRANSLATION)))
    assert table == {
        "encoder embedding: words": 2_048_000,
        "encoder layer 0: LSTM": 1_052_672,
        "encoder layer 1: LSTM": 1_576_960,
        "decoder layer 0: LSTM": 526_336,
        "decoder layer 1: LSTM": 526_336,
        "attention": 131_584 + 131_328,
        "combine": 131_328,
        "readout": 2_056_000,
    }


def test_weights_start_as_torch_starts_them():
    model = build(replace(TRANSLATION, vocabulary=503))
    words = model.encoder.embedding.words.weight
    assert not words[0].any()
    assert 0.98 < words[1:].std().item() < 1.02
    for layer in (*model.encoder.layers, *model.decoder.layers):
        for parameter in layer.parameters():
            assert 0.99 / 16 < parameter.abs().max().item() <= 1 / 16
    for linear, inputs in ((model.attention.query, 256), (model.attention.outputs[0], 512), (model.combine.inner, 512)):
        for parameter in linear.parameters():
            assert 0.9 * inputs**-0.5 < parameter.abs().max().item() <= inputs**-0.5


def torchs(stack, inputs):
    """nn.LSTM with the weights of our stack."""
    first = stack.layers[0]
    size, both = first.size, first.directions == 2
    lstm = nn.LSTM(inputs, size, len(stack.layers), batch_first=True, bidirectional=both).double()
    for number, layer in enumerate(stack.layers):
        for direction, end in enumerate(("", "_reverse")[: layer.directions]):
            for theirs, ours in (
                ("weight_ih", layer.input_weight), ("weight_hh", layer.recurrent_weight),
                ("bias_ih", layer.input_bias), ("bias_hh", layer.recurrent_bias),
            ):  # fmt: skip
                getattr(lstm, f"{theirs}_l{number}{end}").data.copy_(ours[direction])
    return lstm


def transcribed(model, x, y, *, tanh=False, add=False):
    """The translation model row by row, as §2.1 and the authors' facts have it: softmax weights and logits."""
    words, logits = model.encoder.embedding.words.weight, []
    encoder, decoder = torchs(model.encoder, words.shape[1]), torchs(model.decoder, words.shape[1])
    directions, layers = model.encoder.layers[0].directions, len(model.encoder.layers)
    query, project = model.attention.query, model.attention.outputs[0]
    for source, target in zip(x, y, strict=True):
        h, (last_h, last_c) = encoder(words[source[source > 0]][None])
        start = [last.view(layers, directions, 1, -1).mean(1) for last in (last_h, last_c)]
        s, _ = decoder(words[target][None], tuple(start))
        weights = torch.softmax(query(s[0]) @ h[0].T, dim=-1)  # (i,j)
        context = project(weights @ h[0])
        if add:
            hidden = s[0] + context
        else:
            hidden = model.combine.inner(torch.cat([s[0], context], dim=-1))
            hidden = torch.tanh(hidden) if tanh else torch.relu(hidden)
        logits.append(hidden @ model.readout.weight.T + model.readout.bias)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, {}),
        ({"activation": "tanh", "bidirectional": False, "layers": 1}, {"tanh": True}),
        ({"combine": "add"}, {"add": True}),
    ],
    ids=["translation", "copy", "additive"],
)
def test_the_translator_is_its_equations(changes, form):
    model, (x, y) = made(**changes), batch()
    torch.testing.assert_close(model(x, y), transcribed(model, x, y, **form), **close)


@pytest.mark.parametrize("join", ["sum", "mean"])
def test_several_heads_are_equation_21_or_the_authors_form(join):
    model, (x, y) = made(heads=3, join=join), batch()
    found = record(model, (x, y)).layers[0]
    attention, s, h = model.attention, found.inputs, found.grouped_values[:, 0]
    contexts = []
    for k in range(3):
        rows = slice(10 * k, 10 * (k + 1))
        q = s @ attention.query.weight[rows].T + attention.query.bias[rows]
        scores = (q @ h.mT).masked_fill((x == 0)[:, None], -torch.inf)
        contexts.append(scores.softmax(-1) @ h)
    if join == "sum":
        expected = attention.outputs[0](sum(contexts))
    else:
        expected = sum(linear(c) for linear, c in zip(attention.outputs, contexts, strict=True)) / 3
    torch.testing.assert_close(found.outputs, expected, **close)


def test_the_classifier_is_its_equations():
    model, (x, _) = made(CLASSIFIER), batch()
    words, attention, readout = model.encoder.embedding.words.weight, model.attention, model.readout.positive
    encoder = torchs(model.encoder, 7)
    for tokens, logits in zip(x, model(x), strict=True):
        h = encoder(words[tokens[tokens > 0]][None])[0][0]
        alpha = torch.softmax(attention.score(torch.relu(attention.key(h)))[:, 0], dim=0)
        positive = torch.sigmoid(readout(alpha @ h))
        torch.testing.assert_close(logits.softmax(-1), torch.cat([1 - positive, positive]), **close)
    packed = pack_padded_sequence(words[x], (x > 0).sum(1), batch_first=True, enforce_sorted=False)
    h, _ = pad_packed_sequence(encoder(packed)[0], batch_first=True)
    live = (x > 0)[..., None]
    torch.testing.assert_close(model.encoder(x, x > 0)[0] * live, h * live, **close)


def test_the_classifiers_scores_have_their_bias():
    """Under softmax it would not show."""
    model, (x, _) = made(CLASSIFIER, attention="sigmoid", attention_options={"offset": 0.0}), batch()
    h = record(model, x).layers[0].grouped_values[:, 0]
    expected = model.attention.score(torch.relu(model.attention.key(h)))[..., 0].sigmoid() * (x > 0)
    torch.testing.assert_close(record(model, x).layers[0].weights[:, 0, 0], expected, **close)


def test_more_classes_have_a_logit_each():
    model = made(CLASSIFIER, classes=4)
    assert model(batch()[0]).shape == (3, 4)


@pytest.mark.parametrize("config", [SMALL, CLASSIFIER], ids=["translator", "classifier"])
def test_padding_changes_nothing(config):
    model, (x, y) = made(config), batch()
    inputs = (x, y) if config is SMALL else (x,)
    wide = tuple(torch.nn.functional.pad(t, (0, 5)) for t in inputs)
    for before, after in zip(model(*inputs), model(*wide), strict=True):
        torch.testing.assert_close(after[: len(before)] if config is SMALL else after, before, **close)


def test_a_row_of_padding_alone_is_finite():
    for config in (SMALL, CLASSIFIER):
        model = made(config).train()
        inputs = tuple(torch.zeros(2, 5, dtype=torch.long) for _ in range(2 if config is SMALL else 1))
        model(*inputs).sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_table_of_gates_is_the_same_function():
    """In training, with fewer words than tokens, gates are looked up; outputs and every gradient are as without."""
    model, (x, y) = made(), batch(examples=11)
    results = []
    for training in (False, True):
        model.train(training).zero_grad()
        logits = model(x, y)
        logits.sin().sum().backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_gradients_of_words_are_summed_by_a_product_as_without():
    torch.manual_seed(2)
    tokens, x = torch.randint(7, (3, 5, 11)), torch.randn(3, 5, 11, 13)
    expected = torch.stack([torch.nn.functional.one_hot(own, 7).float().flatten(0, 1).mT for own in tokens])
    expected = expected @ x.flatten(1, 2)
    for by_product in (False, True):
        torch.testing.assert_close(sum_by_word(x, tokens, 7, by_product=by_product), expected)


@pytest.mark.parametrize("by_product", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_the_gradient_of_a_frequent_word_is_summed_in_float32(by_product):
    """In bfloat16 a sum of ones stops at 256."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, tokens = torch.ones(2, 5, 1000, 3, dtype=torch.bfloat16, device=device), torch.full((2, 5, 1000), 4)
    total = sum_by_word(x, tokens.to(device), 7, by_product=by_product)
    assert total.dtype == torch.bfloat16
    assert total[:, 4].eq(torch.tensor(5000.0).bfloat16().item()).all()
    assert total.count_nonzero() == 2 * 3


@pytest.mark.gpu
def test_gradients_of_words_are_the_same_each_time_on_a_gpu():
    x, tokens = torch.randn(2, 50, 100, 64, device="cuda"), torch.randint(600, (2, 50, 100), device="cuda")
    first, *others = (sum_by_word(x, tokens, 600, by_product=False) for _ in range(5))
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("training", [True, False])
def test_a_token_that_is_no_word_is_refused(training):
    model = made().train(training)
    with pytest.raises(ValueError, match="got 23"):
        model(torch.full((3, 7), 23), batch()[1])


def test_dropout_falls_between_layers_only():
    x, y = batch()
    one = made(layers=1, dropout=0.5).train()
    assert torch.equal(one(x, y), one(x, y))
    two = made(dropout=0.5).train()
    assert not torch.equal(two(x, y), two(x, y))


def check_record(model, inputs, name):
    found = record(model, inputs)
    (layer,) = found.layers
    assert (layer.kind, layer.index, found.meta["mechanism"]) == ("cross", 0, name)
    torch.testing.assert_close(layer.weights @ layer.values, layer.context, **close)
    outputs = torch.einsum("bhid,hde->bie", layer.mixed, layer.output_weight)
    outputs = outputs if layer.output_bias is None else outputs + layer.output_bias
    torch.testing.assert_close(outputs, layer.outputs, **close)
    assert not layer.weights.masked_select(~layer.mask.expand_as(layer.weights)).any()
    assert layer.inputs.shape[:2] == layer.outputs.shape[:2]
    readout = found.readout["hidden"] @ found.readout["weight"].T + found.readout["bias"]
    torch.testing.assert_close(readout, model(*inputs), **close)


@pytest.mark.parametrize("name", [name for name in CROSS if not MECHANISMS[name](2, 4).needs_layer])
def test_any_mechanism_serves_and_is_recorded(name):
    check_record(made(attention=name, heads=2), batch(), name)
    check_record(made(CLASSIFIER, attention=name, width=6, bidirectional=False), batch()[:1], name)


def test_dot_is_softmax_with_scale_1_and_uniform_is_uniform():
    model, (x, y) = made(), batch()
    same = made(attention="softmax")
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(same(x, y), model(x, y), **close)
    assert made(attention_options={"scale": 0.25}).attention.mechanism.scale == 0.25
    uniform = made(attention="uniform")
    live = (x > 0).double()
    expected = (live / live.sum(1, keepdim=True))[:, None, None].expand(-1, 1, y.shape[1], -1)
    torch.testing.assert_close(record(uniform, (x, y)).layers[0].weights, expected, **close)
    uniform(x, y).sin().sum().backward()
    assert not uniform.attention.query.weight.grad.any()
    assert uniform.attention.outputs[0].weight.grad.any()


def test_step_by_step_equals_the_full_pass():
    model, (x, y) = made(), batch()
    expected, state = model(x, y), model.start(x)
    pieces = [model.step(y[:, :2], state), model.step(y[:, 2:3], state), model.step(y[:, 3:], state)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **close)
    rows = torch.tensor([2, 2, 0])
    state = model.start(x)
    model.step(y[:, :1], state)
    torch.testing.assert_close(model.step(y[rows, 1:2], state.select(rows)), expected[rows, 1:2], **close)
    with pytest.raises(ValueError, match="3 examples"):
        model.step(y[:2, :1], state)


def test_noise_step_by_step_equals_the_full_pass():
    from attnlab.mechanisms.noise import seed_noise

    model, (x, y) = made(attention="coda-cs"), batch()
    with seed_noise(model, 5):
        expected, state = model(x, y), model.start(x)
        stepped = torch.cat([model.step(y[:, t : t + 1], state) for t in range(y.shape[1])], dim=1)
    torch.testing.assert_close(stepped, expected, **close)


def test_beams_in_place_equal_plain_ones():
    """What a CUDA graph replays, run as it stands: pinned states, reordered in place, restarted for a second batch."""
    model, (x, _) = made(), batch()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # so that the state decides what follows
    rules = {"beam": 3, "n_best": 3, "max_length": 9}
    session = Session(model, Rules(**rules), 3, 7, 32, x.device, captured=False)
    for source in (x, x.flip(0), x.flip(1)):
        plain, pinned = decode_beam(model, source, **rules), session.run(source, Rules(**rules).compute_limits(source))
        for ours, theirs in zip(chain(*plain.hypotheses), chain(*pinned.hypotheses), strict=True):
            assert (ours.tokens, pytest.approx(ours.score)) == (theirs.tokens, theirs.score)
        for row, best in zip(source, plain.best, strict=True):
            forced = model(row[None], torch.tensor([[1, *best.tokens[:-1]]])).log_softmax(-1)[0]
            assert best.log_probs == pytest.approx([forced[t, token].item() for t, token in enumerate(best.tokens)])
    assert isinstance(model.start(x), Pinnable)
    for row, best in zip(x, decode_greedy(model, x, max_length=9).best, strict=True):
        logits = model(row[None], torch.tensor([[1, *best.tokens[:-1]]]))[0]
        logits[:, :2] = -torch.inf  # padding and <s> are never chosen
        assert logits.argmax(1).tolist()[: len(best.tokens) - best.cut] == [*best.tokens][: len(best.tokens) - best.cut]


@pytest.mark.parametrize("config", [SMALL, CLASSIFIER], ids=["translator", "classifier"])
@pytest.mark.parametrize("name", ["dot", "uniform"])
def test_many_models_at_once_equal_one_by_one(config, name):
    """As a population trains: stacked weights, vmap over the ordinary model, one backward of the summed loss."""
    config = replace(config, attention=name)
    models = [build(config).double().train() for _ in range(3)]
    x, y = batch(examples=5)
    inputs = (x, y) if config.model == "translator" else (x,)
    parameters, buffers = stack_module_state(models)
    skeleton = build_on_meta(config)

    def loss(weights, state):
        return functional_call(skeleton, (weights, state), inputs).log_softmax(-1)[..., 1].sum()

    vmap(loss)(parameters, buffers)  # a first time, which leaves nothing behind in the skeleton
    losses = vmap(loss)(parameters, buffers)
    losses.sum().backward()
    assert all(p.is_meta for p in skeleton.parameters())
    assert len(list(skeleton.parameters())) == len(parameters)
    for k, model in enumerate(models):
        alone = model(*inputs).log_softmax(-1)[..., 1].sum()
        alone.backward()
        torch.testing.assert_close(losses[k], alone, **close)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[key].grad[k], parameter.grad, **close)


def test_only_the_attention_is_trained_where_beta_is_frozen():
    other = made(CLASSIFIER)
    model = made(CLASSIFIER, trained="attention")
    before = model.attention.key.weight.clone()
    load_backbone(model, other.state_dict())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"attention.{name}" for name in ("key.weight", "key.bias", "score.weight", "score.bias")}
    assert torch.equal(model.encoder.layers[0].input_weight, other.encoder.layers[0].input_weight)
    assert torch.equal(model.readout.positive.weight, other.readout.positive.weight)
    assert torch.equal(model.attention.key.weight, before)
    model(batch()[0]).sin().sum().backward()
    assert model.attention.key.weight.grad.any()
    with pytest.raises(ValueError, match=r"weights.*encoder"):
        load_backbone(model, made(CLASSIFIER, vocabulary=29).state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers"),
        ({"dropout": 1.0}, "dropout"),
        ({"join": "max"}, "join"),
        ({"target_vocabulary": 19}, "share_embeddings"),
        ({"padding": 23}, "padding"),
        ({"model": "classifier", "heads": 3}, "heads"),
        ({"model": "classifier", "classes": 1}, "classes"),
    ],
)
def test_what_a_configuration_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_what_build_refuses():
    with pytest.raises(TypeError, match="LSTMConfig"):
        build("lstm")
    with pytest.raises(ValueError, match="self-attention only"):
        made(attention="shaped")
    with pytest.raises(ValueError, match="bidirectional=false"):
        made(CLASSIFIER, attention="nap")
    assert isinstance(made(target_vocabulary=19, share_embeddings=False), LSTMTranslator)
    assert made(target_vocabulary=19, share_embeddings=False)(*(t.clamp(max=18) for t in batch())).shape[-1] == 19
    assert isinstance(LSTMConfig(model="translator", vocabulary=5), LSTMConfig)
