"""attnlab-lm-eval: the command of lm-eval, in which --model hf also loads adapted models."""

from importlib.util import find_spec


def main() -> None:
    """Tell transformers about attnlab, then run lm-eval's own command."""
    if find_spec("lm_eval") is None:
        raise SystemExit("attnlab: attnlab-lm-eval needs lm-eval, which is not installed: pip install lm-eval")
    from lm_eval.__main__ import cli_evaluate

    import attnlab.huggingface  # noqa: F401

    cli_evaluate()
