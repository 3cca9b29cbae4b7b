"""Categories of questions as small numbers, for `experience.difficulty_per_category`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from exgrpo_megatron.errors import ConfigError

_MOST = int(np.iinfo(np.int16).max)


class Categories:
    """Number 0 has the questions without a category, and those that nobody knows; the others follow by name."""

    def __init__(self, of: Mapping[str, str | None]) -> None:
        """`of`: question id to category.

        Raises:
            ConfigError: there are more than fit.
        """
        self._of = of
        names = sorted({name for name in of.values() if name is not None})
        if len(names) >= _MOST:
            raise ConfigError(
                f"experience.difficulty_per_category = true with {len(names)} categories in data.train: at most "
                f"{_MOST - 1} are possible; name another column in data.train.category_key"
            )
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self.count = 1 + len(names)

    def number(self, question_id: str) -> int:
        name = self._of.get(question_id)
        return 0 if name is None else self._numbers[name]


NO_CATEGORIES = Categories({})
