"""When a run warns that its data or its experience runs dry or grows stale."""

from __future__ import annotations

from exgrpo_megatron.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Section, Share, key


class AlarmsConfig(Section):
    """Thresholds (null: no alarm); an alarm warns once when its number passes, and again only after it was back."""

    min_data_left: Share | None = key(0.2, "least share of the training questions that are not retired")
    drain_before_end: bool = key(
        True, "warn where at the current rate every question is retired before the run's last step"
    )
    min_epochs_left: PositiveFloat | None = key(
        None, "least number of epochs until every question is retired, at the current rate", "epochs"
    )
    max_mean_age_steps: NonNegativeFloat | None = key(
        None, "largest mean age of a step's replayed answers, in steps since they were stored", "steps"
    )
    max_mean_age_versions: NonNegativeFloat | None = key(
        None, "the same in optimiser steps since the weights that wrote them", "versions"
    )
    max_duplicates: Share | None = key(
        None, "largest share of a step's correct new answers that were stored already, with the same tokens"
    )
    max_repeated: Share | None = key(
        None, "largest share of a step's replayed questions that were replayed in the last repeat_steps steps too"
    )
    max_uses_per_answer: PositiveFloat | None = key(None, "largest number of replays in the run for each answer stored")
    average_steps: PositiveInt = key(
        20, "steps over which the rate of retirement is averaged; until then there is none", "steps"
    )
    repeat_steps: PositiveInt = key(10, "steps that freshness/repeated looks back", "steps")
