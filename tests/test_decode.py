"""Beam search equals one by hand, finds the argmax of an enumeration, and rescores; greedy, plain and static agree."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from properties import given, settings, st
from representatives import every_kind
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from attnlab.decoding import decode
from attnlab.decoding.decode import BeamSearch, Pinnable, Session, decode_beam, decode_greedy
from attnlab.decoding.search import Hypothesis, Rules
from attnlab.mechanisms import MECHANISMS, Mechanism
from attnlab.mechanisms.kernels.launch import LAUNCHED
from attnlab.mechanisms.noise import seed_noise
from attnlab.models.cache import StaticCache
from attnlab.models.transformer import TransformerConfig, build

PAD, BOS, EOS = 0, 1, 2
SMALL = {"vocabulary": 23, "layers": 2, "width": 12, "heads": 3, "feed_forward": 13}


def translator(name="softmax", vocabulary=11, **changes):
    if MECHANISMS[name].self_only:
        changes |= {"cross_attention": "softmax"}
    config = TransformerConfig(model="translator", target_vocabulary=vocabulary, attention=name, **SMALL)
    model = build(replace(config, **changes)).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    return model


def sources():
    source = torch.randint(3, 23, (4, 7))
    source[1, 4:], source[2, 1:], source[3, 6:] = PAD, PAD, PAD
    return source


@dataclass
class Bigrams:
    """Tables of log p(next | last, time) for each sentence, not a module; its states can only select."""

    table: torch.Tensor  # (b,t,v,v)

    @dataclass
    class State:
        table: torch.Tensor
        time: int = 0

        def select(self, examples):
            return Bigrams.State(self.table[examples], self.time)

    def start(self, source, *, static=None):
        return self.State(self.table)

    def step(self, tokens, state):
        state.time += 1
        return state.table[torch.arange(len(tokens)), state.time - 1, tokens[:, -1]].unsqueeze(1)

    def __call__(self, source, target):
        return self.table[:1, range(target.shape[1]), target[0]]


@torch.no_grad()
def log_probs(model, source, tokens):
    """log p of each token by one full pass over source (1,j)."""
    logits = model(source, torch.tensor([[BOS, *tokens[:-1]]]))
    return logits[0].log_softmax(-1)[range(len(tokens)), list(tokens)]


def by_hand(model, source, *, beam, n_best=1, length_penalty=1.0, limit, min_length=1):
    """The beam search that search.py describes, for one sentence, in lists, and always to the end."""
    running, finished = [((), 0.0)], []
    for length in range(1, limit + 1):
        candidates = []
        for tokens, total in running:
            chances = model(source, torch.tensor([[BOS, *tokens]]))[0, -1].log_softmax(-1).tolist()
            barred = {PAD, BOS} | ({EOS} if length < min_length else set())
            allowed = [EOS] if length == limit else [word for word in range(len(chances)) if word not in barred]
            candidates += [((*tokens, word), total + chances[word]) for word in allowed]
        candidates.sort(key=lambda candidate: -candidate[1])
        finished += [(tokens, x / length**length_penalty) for tokens, x in candidates[:beam] if tokens[-1] == EOS]
        running = [(tokens, x) for tokens, x in candidates if tokens[-1] != EOS][:beam]
        if len(finished) >= beam:
            break
    return sorted(finished, key=lambda ended: -ended[1])[:n_best]


def static(model, source, *, batch=6, width=8, room=None, device="cpu", captured=False, **rules):
    """Run the steps that a GPU would replay."""
    made = Rules(**rules)
    limits = made.compute_limits(source)
    longest = room or decode._find_room(int(limits.max()))
    return Session(model, made, batch, width, longest, torch.device(device), captured=captured).run(source, limits)


def assert_same(got: list[list[Hypothesis]], expected: list[list[Hypothesis]]):
    for ours, theirs in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
        assert (ours.tokens, ours.cut) == (theirs.tokens, theirs.cut)
        assert ours.score == pytest.approx(theirs.score, abs=1e-10)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-10)


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 7),
    limit=st.integers(1, 9),
    penalty=st.sampled_from([-0.7, 0.0, 0.6, 1.0, 2.3]),
    floor=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_beam_search_is_the_one_described(seed, width, limit, penalty, floor):
    table = 2 * torch.randn(3, limit, 7, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rules = {"beam": width, "n_best": (width + 1) // 2, "length_penalty": penalty, "min_length": min(floor, limit)}
    got = decode_beam(Bigrams(table), torch.ones(3, 1).long(), max_length=limit, **rules).hypotheses
    for row, found in zip(table, got, strict=True):
        expected = by_hand(Bigrams(row[None]), None, limit=limit, **rules)
        assert [hypothesis.tokens for hypothesis in found] == [tokens for tokens, _ in expected]
        assert [hypothesis.score for hypothesis in found] == pytest.approx([score for _, score in expected], abs=1e-10)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_a_wide_beam_finds_the_argmax_of_all_translations(penalty):
    model, source = translator(vocabulary=6), sources()[:2]
    every = [(*words, EOS) for n in range(4) for words in itertools.product([3, 4, 5], repeat=n)]
    found = decode_beam(model, source, beam=len(every) + 1, n_best=7, length_penalty=penalty, max_length=4).hypotheses
    for row, hypotheses in zip(source, found, strict=True):
        row = row[row != PAD][None]
        scores = {y: float(log_probs(model, row, y).sum()) / len(y) ** penalty for y in every}
        assert [h.tokens for h in hypotheses] == sorted(scores, key=lambda y: -scores[y])[:7]


@every_kind
def test_scores_equal_a_full_pass(name):
    model, source = translator(name), sources()
    rules = {"beam": 3, "n_best": 2, "length_penalty": 0.6, "max_length": (1.0, 3.0)}
    decoded = decode_beam(model, source, **rules)
    assert not decoded.captured
    for row, found in zip(source, decoded.hypotheses, strict=True):
        for hypothesis in found:
            expected = log_probs(model, row[row != PAD][None], hypothesis.tokens)
            assert hypothesis.log_probs == pytest.approx(expected.tolist(), abs=1e-10)
            assert hypothesis.score == pytest.approx(float(expected.sum()) / len(hypothesis.tokens) ** 0.6, abs=1e-10)
    assert_same(static(model, source, **rules).hypotheses, decoded.hypotheses)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_beam_1_is_greedy(seed, penalty):
    torch.manual_seed(seed)
    model, source = translator("coda"), sources()
    by_greedy = decode_greedy(model, source, max_length=9, min_length=3, length_penalty=penalty)
    assert_same(decode_beam(model, source, beam=1, length_penalty=penalty, max_length=9, min_length=3).hypotheses,
                by_greedy.hypotheses)  # fmt: skip
    for row, hypothesis in zip(source, by_greedy.best, strict=True):
        logits = model(row[None], torch.tensor([[BOS, *hypothesis.tokens[:-1]]]))[0]
        logits[:, [PAD, BOS]] = logits[:2, EOS] = -torch.inf
        chosen = logits.argmax(1).tolist()
        assert tuple(chosen) == hypothesis.tokens or (hypothesis.cut and tuple(chosen[:-1]) == hypothesis.tokens[:-1])


@every_kind
def test_neither_company_nor_padding_changes_a_sentence(name):
    model, source = translator(name), sources()
    together = decode_beam(model, source, beam=3, max_length=(1.5, 2.0)).hypotheses
    for number, row in enumerate(source):
        assert_same(
            decode_beam(model, row[row != PAD][None], beam=3, max_length=(1.5, 2.0)).hypotheses, [together[number]]
        )
    wider = torch.nn.functional.pad(source[[3, 1, 1]], (0, 5), value=PAD)
    assert_same(decode_beam(model, wider, beam=3, max_length=(1.5, 2.0)).hypotheses, [together[n] for n in (3, 1, 1)])


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_caches_seen_in_part_are_the_same(positions, monkeypatch):
    model, source = translator(positions=positions, max_length=13), sources()
    rules = {"beam": 3, "max_length": (1.0, 5.0), "min_length": 5}
    expected = decode_beam(model, source, **rules)
    for room in (1, 4, 32):  # 1, 2, 4, 8, 13 places; or 4, 8, 13; or 13 at once
        monkeypatch.setattr(decode, "SMALLEST_ROOM", room)
        assert_same(static(model, source, **rules).hypotheses, expected.hypotheses)


def test_a_session_forgets_the_batch_before(monkeypatch):
    monkeypatch.setattr(decode, "LOOK_EVERY", 1)
    model, source = translator("coda"), sources()
    rules = Rules(beam=3, max_length=(1.0, 3.0))
    session = Session(model, rules, 5, 8, 32, torch.device("cpu"), captured=False)
    broken = translator("coda")
    broken.decoder.blocks[0].attention.value.bias.data.fill_(torch.nan)
    session.model = broken
    with pytest.raises(ValueError, match="NaN"):
        session.run(source, rules.compute_limits(source))
    session.model = model
    for batch in (source, source[:1], source[1:2, :4], source[[2, 0, 3]]):
        got, expected = (
            session.run(batch, rules.compute_limits(batch)),
            decode_beam(model, batch, beam=3, max_length=(1.0, 3.0)),
        )
        assert_same(got.hypotheses, expected.hypotheses)
        assert got.steps == expected.steps
    assert all(
        cache.tensors[0].shape == (5, 3, 96, 4) for cache, _ in session.state.caches if isinstance(cache, StaticCache)
    )


@every_kind
def test_what_is_captured_never_waits_for_a_value(name):
    cross = "softmax" if MECHANISMS[name].self_only else None
    config = TransformerConfig(model="translator", attention=name, cross_attention=cross, **SMALL)
    with FakeTensorMode(), torch.no_grad():  # tensors without values: reading one raises
        session = Session(build(config).eval(), Rules(beam=3), 5, 8, 64, torch.device("cpu"), captured=False)
        session.begin()
        for room in (32, 64):
            session._get_step(room)()
        with pytest.raises(DataDependentOutputException):
            session.search.is_over()


@torch.no_grad()
def test_what_is_captured_stays_in_its_place():
    session = Session(translator("coda"), Rules(beam=3), 5, 8, 64, torch.device("cpu"), captured=False)

    def places():
        kept = [x for own, cross in session.state.caches for cache in (own, cross) for x in cache.tensors]
        found = [session.source, session.state.length, session.state.memory_mask, *kept]
        return [x.data_ptr() for x in found + [x for x in vars(session.search).values() if isinstance(x, torch.Tensor)]]

    before = places()
    session.search.limit.fill_(9)
    session.begin()
    for room in (32, 64):
        session._get_step(room)()
    assert int(session.state.length) == int(session.search.time) == 2
    assert places() == before


@pytest.mark.parametrize(("name", "expected"), [("softmax", []), ("fox", [12, 12])], ids=["shared", "repeated"])
def test_keys_of_the_source_are_never_reordered(name, expected, monkeypatch):
    model, selected = translator(name), []
    kept = type(model.start(sources()).caches[0][1])
    original = kept.select
    monkeypatch.setattr(kept, "select", lambda self, rows: selected.append(len(rows)) or original(self, rows))
    decode_beam(model, sources(), beam=3, max_length=6, min_length=6)
    assert selected == expected  # once a layer, when they are repeated; hypotheses that share keys need no copy


def test_a_sentence_that_is_won_stops():
    table = torch.full((1, 50, 5, 5), -9.0)
    table[..., EOS] = 9.0
    decoded = decode_beam(Bigrams(table), torch.ones(1, 1).long(), length_penalty=0.0, max_length=50)
    assert (decoded.steps, decoded.best[0].tokens) == (1, (EOS,))


def test_a_sentence_that_may_yet_be_won_goes_on():
    table = torch.full((1, 11, 4, 4), -torch.inf)  # eos at once: −1; one word, then certainty up to eos: −2.5
    table[:, 0, BOS] = torch.tensor([1 - math.exp(-1) - math.exp(-2.5), 0, math.exp(-1), math.exp(-2.5)]).log()
    table[:, 1:, :, 3], table[:, 10, :, 3], table[:, 10, :, EOS] = 0.0, -torch.inf, 0.0
    found = decode_beam(Bigrams(table), torch.ones(1, 1).long(), beam=3, n_best=2, max_length=11).hypotheses[0]
    assert [(len(h.tokens), round(h.score, 5)) for h in found] == [(11, round(-2.5 / 11, 5)), (1, -1.0)]
    alone = decode_beam(Bigrams(table), torch.ones(1, 1).long(), beam=3, max_length=11).best[0]
    assert alone == found[0]


def test_a_penalty_below_0_makes_the_next_length_the_best_ahead():
    table = torch.full((1, 11, 4, 4), -torch.inf)  # eos at once: −1; a word and then eos: −0.5 · 2^0.7
    table[:, 0, BOS] = torch.tensor([1 - math.exp(-1) - math.exp(-0.5), 0, math.exp(-1), math.exp(-0.5)]).log()
    table[:, 1:, :, EOS] = 0.0
    found = decode_beam(Bigrams(table), torch.ones(1, 1).long(), beam=3, length_penalty=-0.7, max_length=11).best[0]
    assert found.tokens == (3, EOS)
    assert found.score == pytest.approx(-0.5 * 2**0.7)


def test_the_limit_is_each_sentences_own():
    table = torch.zeros(3, 7, 5, 5)
    table[..., EOS] = -50.0
    source = torch.tensor([[3, 3, 3], [3, 0, 0], [0, 0, 0]])
    for decode_by in (decode_greedy, decode_beam):
        found = decode_by(Bigrams(table), source, max_length=(2.0, 1.0)).best
        assert [(len(h.tokens), h.tokens[-1], h.cut) for h in found] == [(7, EOS, True), (3, EOS, True), (1, EOS, True)]


def test_an_empty_source_can_be_translated():
    model = translator()
    nothing, padded = torch.empty(2, 0).long(), torch.zeros(2, 3).long()
    for decode_by in (decode_greedy, decode_beam, static):
        assert_same(
            decode_by(model, nothing, max_length=5).hypotheses, decode_by(model, padded, max_length=5).hypotheses
        )
        assert all(torch.tensor(h.log_probs).isfinite().all() for h in decode_by(model, nothing, max_length=5).best)


def test_weights_in_another_type():
    model, source = translator().float(), sources()
    got = decode_beam(model, source, weights=torch.bfloat16, max_length=5)
    assert got == decode_beam(translator_in(model, torch.bfloat16), source, max_length=5)
    assert next(model.parameters()).dtype == torch.float32
    assert got != decode_beam(model, source, max_length=5)


def translator_in(model, dtype):
    other = build(TransformerConfig(model="translator", target_vocabulary=11, **SMALL)).eval()
    other.load_state_dict(model.state_dict())
    return other.to(dtype)


def test_what_decoding_leaves_as_it_was():
    model, source = translator(), sources()
    before = source.clone()
    with torch.inference_mode():
        search = BeamSearch(model, max_length=4)
        first = search(source)
    assert search(source) == first
    assert torch.equal(source, before)
    model(source, source.clamp_max(10)).sum().backward()  # nothing of the search is left in the model


def test_nan_is_refused():
    table = torch.randn(3, 5, 5, 5)
    table[1, 0, :, 3], table[1, 1] = 9.0, torch.nan  # sentence 1, after its first token
    for decode_by in (decode_greedy, decode_beam):
        with pytest.raises(ValueError, match=r"sentence 1: .* NaN .* token 2"):
            decode_by(Bigrams(table), torch.ones(3, 1).long(), max_length=5)


def test_what_is_refused():
    model, source = translator(positions="learned", max_length=13), sources()
    for rules, message in {
        (("beam", 0),): "beam must be at least 1",
        (("length_penalty", float("nan")),): "length_penalty must be finite",
        (("length_penalty", 99.0),): "length_penalty must be at",
        (("n_best", 6),): "n_best=6 .* beam=5",
        (("eos", 1),): "three different tokens",
        (("min_length", 0),): "min_length must be at least 1",
        (("max_length", (0.5, 0.0)),): r"max_length=\(0.5, 0.0\) .* 0 tokens",
        (("padding", 4),): "padding=4 must be that of the model, 0",
        (("eos", 11),): "eos=11 .* vocabulary of 11",
        (("captured", True),): "needs a CUDA device",
    }.items():
        with pytest.raises(ValueError, match=message):
            decode_beam(model, source, **dict(rules))
    with pytest.raises(TypeError, match="width"):
        decode_beam(model, source, width=3)
    with pytest.raises(TypeError, match="beam"):
        decode_greedy(model, source, beam=2)
    with pytest.raises(ValueError, match=r"source must be integers .* \(7,\)"):
        decode_beam(model, source[0])
    with pytest.raises(ValueError, match=r"14 tokens.* 13 positions"):
        static(model, source, max_length=14)
    with seed_noise(model, 3):
        decode_beam(model, source, max_length=3)  # there is no noise in this model
    stochastic = translator("coda")
    with seed_noise(stochastic, 3), pytest.raises(ValueError, match="seed_noise"):
        decode_beam(stochastic, source)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        decode_beam(model.train(), source)
    never = torch.zeros(1, 3, 5, 5)
    never[..., EOS] = -torch.inf
    with pytest.raises(ValueError, match="sentence 0: no hypothesis can end"):
        decode_beam(Bigrams(never), torch.ones(1, 1).long(), max_length=3)


def test_a_state_of_ours_can_be_pinned_and_what_cannot_says_so():
    model = translator()
    assert isinstance(model.start(sources()), Pinnable)
    assert not isinstance(Bigrams(torch.zeros(1, 1, 5, 5)).start(None), Pinnable)
    pinned = model.start(sources(), static=5)
    pinned.pin(torch.device("cpu"))
    model.step(torch.full((2, 1), BOS), pinned.select(torch.tensor([2, 0])))
    assert pinned.length == 0
    with pytest.raises(ValueError, match="static"):
        model.start(sources()).pin(torch.device("cpu"))
    with pytest.raises(ValueError, match="share 3 positions"):
        model.start(sources(), static=5).share_prefix(3)
    with pytest.raises(ValueError, match="restart_"):
        model.start(sources(), static=5).restart_(model.start(sources()))


@pytest.mark.gpu
@every_kind
def test_captured_equals_plain(name):
    model = translator(name).cuda()
    search = BeamSearch(model, beam=3, n_best=2, max_length=(1.0, 3.0), length_penalty=0.6, captured=True)
    for _ in range(3):  # runs, is captured, is replayed
        for source in (sources().cuda(), sources()[:3, :5].cuda()):
            got = search(source)
            assert got.captured
            expected = decode_beam(model, source, captured=False, **vars(search.rules))
            assert not expected.captured
            assert_same(got.hypotheses, expected.hypotheses)
        for parameter in model.parameters():
            parameter.data.mul_(1.01)  # as an optimiser does, in place
    model.double().cpu().cuda()
    assert_same(search(source).hypotheses, decode_beam(model, source, captured=False, **vars(search.rules)).hypotheses)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["coda", "dagpam"])
def test_kernels_decode_as_the_definition(name):
    pytest.importorskip("triton")
    model, device = translator(name).float(), "cuda" if torch.cuda.is_available() else "cpu"
    rules, source = {"beam": 2, "max_length": 2, "min_length": 2}, sources()[:1]
    expected = decode_beam(model, source, **rules)
    for module in model.decoder.modules():
        if isinstance(module, Mechanism):
            module.impl = "fused"
    LAUNCHED.clear()
    got = static(model.to(device), source.to(device), batch=1, room=2, device=device, **rules)
    assert MECHANISMS[name].kernels <= LAUNCHED
    for ours, theirs in zip(got.best, expected.best, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


@pytest.mark.gpu
def test_captured_refuses_nan_and_recovers():
    model, source = translator().cuda(), sources().cuda()
    search = BeamSearch(model, beam=3, max_length=40, min_length=40)
    expected = [search(source) for _ in range(2)][1]
    kept = model.decoder.blocks[0].attention.value.bias.data.clone()
    model.decoder.blocks[0].attention.value.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"sentence 0: .* NaN"):
        search(source)
    model.decoder.blocks[0].attention.value.bias.data.copy_(kept)
    assert_same(search(source).hypotheses, expected.hypotheses)


@pytest.mark.gpu
def test_captured_where_the_state_cannot_be_pinned():
    table, source = torch.randn(2, 4, 5, 5, device="cuda"), torch.ones(2, 1, device="cuda").long()
    assert not decode_beam(Bigrams(table), source, max_length=4).captured
    with pytest.raises(TypeError, match="pinned, got State"):
        decode_beam(Bigrams(table), source, max_length=4, captured=True)
