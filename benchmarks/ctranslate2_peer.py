"""CTranslate2 with the weights of one of our translators: exported as Marian, converted, and run by one CPU thread.

The converter for Marian expects a model that starts from a zero embedding and has its padding last. Ours starts from
bos, so the spec is made by the converter's class for Bart, on which the one for Marian is built.
"""

from pathlib import Path

import ctranslate2
from ctranslate2.converters.transformers import BartLoader
from transformers import MarianMTModel

from attnlab.huggingface.conversion import write_model
from attnlab.huggingface.skeletons import find_skeleton

VERSION = ctranslate2.__version__
COMPUTE_TYPES = ("float32", "int8")
LENGTH = 512  # positions
SPECIALS = ["<pad>", "<s>", "</s>"]  # the first words


class Peer:
    """A model of ours in CTranslate2, in one of COMPUTE_TYPES."""

    def __init__(self, folder, compute_type, vocabulary):
        options = {"compute_type": compute_type, "inter_threads": 1, "intra_threads": 1}
        self.translator = ctranslate2.Translator(str(folder), device="cpu", **options)
        self.words = list_words(vocabulary)
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def decode(self, source, *, beam, tokens):
        """Return the best output of each row of source (b,j), of exactly this number of tokens, without an end."""
        rows = [[self.words[token] for token in row if token] for row in source.tolist()]
        results = self.translator.translate_batch(
            rows, beam_size=beam, min_decoding_length=tokens, max_decoding_length=tokens,
            suppress_sequences=[[word] for word in SPECIALS[:2]],
        )  # fmt: skip
        outputs = [tuple(self.numbers[word] for word in result.hypotheses[0]) for result in results]
        if any(len(output) != tokens for output in outputs):
            raise ValueError(f"CTranslate2 must return {tokens} tokens, got {sorted({len(x) for x in outputs})}")
        return outputs


def build_peers(model, config, folder):
    """Convert a translator with softmax to CTranslate2, and return a Peer for each of COMPUTE_TYPES."""
    folder = Path(folder)
    write_model(model, find_skeleton(config, LENGTH), None, folder / "marian")
    theirs = MarianMTModel.from_pretrained(folder / "marian").eval()
    theirs.config.normalize_before = theirs.config.normalize_embedding = False
    peers = {}
    for compute_type in COMPUTE_TYPES:
        loader = BartLoader()
        spec = loader.get_model_spec(theirs)
        loader.set_vocabulary(spec, list_words(config.vocabulary))
        spec.config.bos_token, spec.config.eos_token = SPECIALS[1:]
        spec.config.decoder_start_token, spec.config.unk_token = SPECIALS[1], SPECIALS[0]
        spec.validate()
        spec.optimize(quantization=compute_type)
        (folder / compute_type).mkdir()
        spec.save(str(folder / compute_type))
        peers[compute_type] = Peer(folder / compute_type, compute_type, config.vocabulary)
    return peers


def list_words(vocabulary):
    return [*SPECIALS, *(f"w{number}" for number in range(len(SPECIALS), vocabulary))]
