"""The whole recipe schema: every key, default, unit, meaning and check.

Names follow NeMo-RL where they mean the same; `experience:` and `variant:` are ours. `None` as the default of a
switch means "as the variant says" (`VARIANTS`); the values in force are printed at start and saved with the run.
Loading and overriding recipes is `recipe.py`.
"""

from __future__ import annotations

from exgrpo_megatron.config.alarms import AlarmsConfig
from exgrpo_megatron.config.choices import AnswerChoice, BucketWeight, Shaping
from exgrpo_megatron.config.data import DataConfig, DataSourceConfig, PassRateBand
from exgrpo_megatron.config.debug import DebugConfig
from exgrpo_megatron.config.demonstrations import DemonstrationsConfig
from exgrpo_megatron.config.eval_sets import EVAL_GROUPS, EvalGroup, EvalSetConfig
from exgrpo_megatron.config.experience import Difficulty, Eviction, ExperienceConfig, ReturnRetiredConfig
from exgrpo_megatron.config.guards import GUARD_LIMITS, GuardsConfig
from exgrpo_megatron.config.loggers import LoggerConfig, MLflowConfig, WandbConfig
from exgrpo_megatron.config.megatron import (
    DistributedDataParallelConfig,
    Fp8Config,
    MegatronConfig,
    MegatronOptimizerConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from exgrpo_megatron.config.objective import (
    VARIANTS,
    EntropyBonus,
    GRPOConfig,
    LossConfig,
    Normalizer,
    RewardShapingConfig,
    VariantName,
    whole_share,
)
from exgrpo_megatron.config.policy import (
    DynamicBatchingConfig,
    LossKernel,
    PolicyConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from exgrpo_megatron.config.replay_step import ReplayStepConfig
from exgrpo_megatron.config.repo import RepoChoice, RepoConfig
from exgrpo_megatron.config.rollouts import MIN_VLLM_TEMPERATURE, AgreementConfig, GenerationConfig, VllmConfig
from exgrpo_megatron.config.run import (
    CheckpointConfig,
    ClusterConfig,
    EnvConfig,
    EvalConfig,
    MathEnvConfig,
    SFTConfig,
)
from exgrpo_megatron.config.section import (
    Count,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    Share,
    Temperature,
    key,
)
from exgrpo_megatron.config.whole import Config, fill_variant

__all__ = [
    "EVAL_GROUPS",
    "GUARD_LIMITS",
    "MIN_VLLM_TEMPERATURE",
    "VARIANTS",
    "AgreementConfig",
    "AlarmsConfig",
    "AnswerChoice",
    "BucketWeight",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "Count",
    "DataConfig",
    "DataSourceConfig",
    "DebugConfig",
    "DemonstrationsConfig",
    "Difficulty",
    "DistributedDataParallelConfig",
    "DynamicBatchingConfig",
    "EntropyBonus",
    "EnvConfig",
    "EvalConfig",
    "EvalGroup",
    "EvalSetConfig",
    "Eviction",
    "ExperienceConfig",
    "Fp8Config",
    "GRPOConfig",
    "GenerationConfig",
    "GuardsConfig",
    "LoggerConfig",
    "LossConfig",
    "LossKernel",
    "MLflowConfig",
    "MathEnvConfig",
    "MegatronConfig",
    "MegatronOptimizerConfig",
    "Name",
    "NonNegativeFloat",
    "Normalizer",
    "OptimizerConfig",
    "PassRateBand",
    "PolicyConfig",
    "PositiveFloat",
    "PositiveInt",
    "ReplayStepConfig",
    "RepoChoice",
    "RepoConfig",
    "ReturnRetiredConfig",
    "RewardShapingConfig",
    "SFTConfig",
    "SchedulerConfig",
    "Section",
    "Seed",
    "SequencePackingConfig",
    "Shaping",
    "Share",
    "Temperature",
    "TokenizerConfig",
    "VariantName",
    "VllmConfig",
    "WandbConfig",
    "fill_variant",
    "key",
    "whole_share",
]
