"""What the configurations of all models share: their checks."""

from dataclasses import fields

from attnlab.config import Natural, check_fields


class ModelConfig:
    """The checks of a configuration, which is a dataclass with these fields and others."""

    model: str
    vocabulary: int
    target_vocabulary: int | None
    padding: Natural

    def check_values(self) -> None:
        """Raise ValueError for a value outside its range or its list of names."""
        check_fields(self)
        if self.padding >= min(self.vocabulary, self.target_vocabulary or self.vocabulary):
            raise ValueError(f"padding must be a token of the vocabulary, got {self.padding}")

    def reject_keys(self, *names: str, owner: str) -> None:
        """Raise ValueError if one of these fields, which only `owner` have, differs from its default."""
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name} is for {owner} only, got {getattr(self, name)!r} for a {self.model}")
