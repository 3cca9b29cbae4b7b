"""Recipes on disk: loading, `defaults:`, `key=value` overrides, error messages, and the tables the CLI prints."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from exgrpo_megatron.config import Config, PolicyConfig
from exgrpo_megatron.errors import ConfigError
from exgrpo_megatron.functions import with_names
from exgrpo_megatron.nemo_rl import is_nemo_rl, translate
from exgrpo_megatron.verl_keys import verl_advice

NEMO_RL_ADVICE = {
    "cluster.segment_size": "leave it out; placement is the launcher's",
    "grpo.adv_estimator": "use grpo.normalize_rewards and grpo.use_leave_one_out_baseline",
    "grpo.async_grpo": "leave it out; rollouts and training take turns",
    "grpo.batch_multiplier": "leave it out; use grpo.num_prompts_per_step",
    "grpo.max_num_epochs": "use grpo.max_num_steps",
    "grpo.max_val_samples": "use data.validation.max_questions",
    "grpo.reward_scaling": "leave it out; a function of yours may scale (env.reward_function)",
    "grpo.reward_shaping.stop_properly_penalty_coef": "use grpo.overlong_filtering or the other keys of reward_shaping",
    "grpo.use_dynamic_sampling": "leave it out; experience.replay_ratio raises the share of mixed groups",
    "grpo.val_batch_size": "leave it out; policy.generation.max_batch_size bounds the batch",
    "logger.mlflow.run_id": "leave it out; a run goes on with the MLflow run it began",
    "logger.monitor_gpus": "leave it out; W&B watches the machine by itself",
    "logger.swanlab_enabled": "leave it out; use logger.wandb_enabled or logger.mlflow_enabled",
    "loss_fn.reference_policy_kl_penalty": "leave it out; ExGRPO has no reference model",
    "loss_fn.sequence_level_importance_ratios": "leave it out; loss_fn.rollout_is is the level of the correction alone",
    "loss_fn.token_level_loss": "use loss_fn.normalizer",
    "data.max_input_seq_len": "use data.max_input_seq_length",
    "data.dataset_name": "use data.train.path",
    "data.train_data_path": "use data.train.path",
    "data.val_data_path": "use data.validation.path",
    "policy.dtensor_cfg": "leave it out; the actor is Megatron-Core (policy.megatron_cfg)",
    "policy.generation.colocated": "leave it out; training and rollouts share the processes",
    "policy.generation.top_k": "leave it out; recorded log-probs need the whole distribution",
    "policy.generation.top_p": "leave it out; recorded log-probs need the whole distribution",
    "policy.generation.vllm_cfg.async_engine": "leave it out; rollouts and training take turns",
    "policy.generation.vllm_cfg.expert_parallel_size": "leave it out; models with experts are not supported",
    "policy.generation.vllm_cfg.kv_cache_dtype": "leave it out; it is that of the engine's weights",
    "policy.generation.vllm_cfg.load_format": "leave it out; the engine's weights come from the actor",
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_cfg.pipeline_parallel_size": "leave it out; engines are tensor parallel at most",
    "policy.generation.vllm_cfg.skip_tokenizer_init": "leave it out; the engine sees token ids only",
    "policy.generation.vllm_cfg.use_deep_gemm": "leave it out; FP8 rollouts are not supported",
    "policy.generation.vllm_kwargs": "use the keys of policy.generation.vllm_cfg",
    "policy.make_sequence_length_divisible_by": "leave it out; lengths are padded to what the parallel layout needs",
    "policy.hf_config_overrides": "edit config.json in policy.model_name",
    "policy.megatron_cfg.enabled": "leave it out; the actor is always Megatron-Core",
    "policy.megatron_cfg.expert_tensor_parallel_size": "leave it out; models with experts are not supported",
    "policy.megatron_cfg.attention_backend": "leave it out; Transformer Engine chooses by shape and GPU",
    "policy.megatron_cfg.bias_dropout_fusion": "leave it out; there is neither a bias nor dropout to fuse",
    "policy.megatron_cfg.fp8_cfg.force_clear_fp8_caches": "leave it out; nothing is moved off the GPU for rollouts",
    "policy.megatron_cfg.masked_softmax_fusion": "leave it out; neither attention has a masked softmax of its own",
    "policy.megatron_cfg.persist_layer_norm": "leave it out; it is for layer norms of apex, and norms here are RMSNorm",
    "policy.megatron_cfg.pipeline_dtype": "leave it out; it is policy.precision",
    "policy.sequence_packing.sequence_length_round": "leave it out; only what the parallel layout needs is padded",
    "policy.optimizer": "use policy.megatron_cfg.optimizer",
    "policy.scheduler": "use policy.megatron_cfg.scheduler",
    "policy.megatron_cfg.optimizer.clip_grad": "use policy.max_grad_norm",
    "sft.max_num_epochs": "use sft.max_num_steps",
}
"""Keys NeMo-RL users may bring that have no place here, with what to do instead."""


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """A recipe, resolved and checked: every key has its value.

    Args:
        recipe: path of a YAML file, or its content as a mapping; the files that `defaults:` names (from the file's
            folder, else from the current one) are beneath it.
        overrides: what stands above it: `section.key=value` texts as on the command line, or a mapping of dotted keys
            to values. A mapping as a value replaces the whole section. A value may be a function (of a module or of the
            script that runs) where the key names one: `env.reward_function`, `data.train.source_function`.

    Raises:
        ConfigError: no such file, or keys or values that break a rule; it names every one.
    """
    return load_with_report(recipe, overrides)[0]


def load_with_report(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> tuple[Config, str | None]:
    """The same, and what became of its keys where the file is a configuration of NeMo-RL (docs/nemo.md), else None."""
    raw, report = _read_given(recipe, overrides)
    return parse_recipe(raw, source=_source(recipe)), report


def given_keys(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> dict[str, Any]:
    """What the recipe, those beneath it and the overrides set, and nothing else, as nested dictionaries; raises
    ConfigError where it is no recipe."""
    raw, _ = _read_given(recipe, overrides)
    parse_recipe(raw, source=_source(recipe))
    return raw


def _read_given(
    recipe: str | Path | Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    if isinstance(recipe, Mapping):
        raw = _over_defaults(with_names(recipe, ""), Path("recipe"), ())
    else:
        raw = _read_with_defaults(Path(recipe), ())
    given = overrides.items() if isinstance(overrides, Mapping) else map(_parsed_override, overrides)
    for name, value in given:
        _apply_override(raw, name, with_names(value, name))
    if not is_nemo_rl(raw):
        return raw, None
    translation = translate(raw, _source(recipe))
    return translation.recipe, translation.report(_source(recipe))


def _source(recipe: str | Path | Mapping[str, Any]) -> str:
    return "recipe" if isinstance(recipe, Mapping) else str(recipe)


def parse_recipe(raw: dict[str, Any], source: str = "recipe") -> Config:
    """A plain nested dictionary as a checked Config; raises ConfigError that names every faulty key."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError("\n".join([f"{source}:", *(f"  {line}" for line in lines)])) from None


def dump_recipe(config: Config) -> str:
    """The resolved recipe as YAML; loading it again gives an equal Config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Option:
    """One recipe key, as `exgrpo options` shows it."""

    name: str
    default: str
    unit: str
    meaning: str
    """With the values there are, where they can be listed."""


def options(prefix: str = "") -> list[Option]:
    """Every recipe key that starts with `prefix`, in the order of the schema."""
    return [option for option in _walk(Config, "") if option.name.startswith(prefix)]


def changed_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs between two resolved recipes."""
    lines = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += changed_keys(before, after, f"{prefix}{name}.")
        elif before != after:
            lines.append(f"{prefix}{name}: {_as_yaml(before)} -> {_as_yaml(after)}")
    return lines


def _as_yaml(value: Any) -> str:
    """As it stands in a recipe: null, true, 0.5, a text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


def derived_table(config: Config, data_parallel_size: int = 1) -> list[tuple[str, str]]:
    """What the recipe's numbers mean, in questions, answers, sequences and tokens."""
    grpo, policy = config.grpo, config.policy
    answers = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    replayed, stored = config.max_replayed_per_step, config.max_replay_step_answers
    per_rank = -(-policy.train_global_batch_size // data_parallel_size)
    return [
        ("questions a step", f"{grpo.num_prompts_per_step}, of which at most {replayed} replayed"),
        ("answers a question (K)", f"{grpo.num_generations_per_prompt}; a replayed question samples one less"),
        ("sequences trained a step", f"{answers}"),
        (
            "rollouts a step",
            f"{answers}, one less for each demonstration"
            if config.demonstrations.enabled
            else f"{answers} without replay, at least {answers - replayed} with it",
        ),
        ("sequences an optimiser step", f"{policy.train_global_batch_size}"),
        ("optimiser steps a step", f"{config.updates_per_step}"),
        *([("stored answers trained on beside them", _replay_steps_text(config, stored))] if stored else []),
        ("optimiser steps in all", f"{config.total_updates}"),
        ("micro-batches an optimiser step", _micro_batches_text(policy, per_rank, data_parallel_size)),
        ("tokens in one sequence, at most", f"{policy.max_total_sequence_length}"),
        ("computed with", _layers_text(policy)),
        ("output layer and loss", _loss_text(policy)),
        ("response tokens a step, at most", f"{answers * policy.generation.max_new_tokens:,}"),
        ("answers in the whole run", f"{answers * grpo.max_num_steps:,}, replayed ones included"),
    ]


def _replay_steps_text(config: Config, answers: int) -> str:
    steps = config.replay_steps_per_step
    where = f"in {steps} replay step{'s' if steps > 1 else ''}" if steps else "joining the update on new ones"
    return f"at most {answers} {where}"


def _micro_batches_text(policy: PolicyConfig, sequences: int, data_parallel_size: int) -> str:
    if policy.token_budget is not None:
        kind = "packed" if policy.sequence_packing.enabled else "padded"
        return f"as many as the lengths need, each of at most {policy.mb_tokens(train=True)} positions, {kind}"
    size = policy.mb_sequences(train=True)
    return f"{-(-sequences // size)} on each of {data_parallel_size} data-parallel rank(s), of at most {size} sequences"


def _layers_text(policy: PolicyConfig) -> str:
    layout, fp8 = policy.megatron_cfg, policy.megatron_cfg.fp8_cfg
    layers = {
        "auto": "Transformer Engine's layers where a GPU has it, else Megatron's own",
        "transformer_engine": "Transformer Engine's layers; refused where they cannot be used",
        "local": "Megatron's own layers",
    }["local" if policy.precision == "float32" else layout.transformer_impl]
    if not fp8.enabled:
        return f"{layers}; {policy.precision}"
    multiple = layout.row_multiple
    return f"{layers}; FP8 ({fp8.fp8}, {fp8.fp8_recipe}), rows padded to multiples of {multiple}"


def _loss_text(policy: PolicyConfig) -> str:
    form = "linear" if policy.loss_kernel == "auto" else policy.loss_kernel
    where = "" if form == "reference" else ", in Triton where a GPU has it, else"
    return f"{form} form{where} in torch"


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(r"[-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """YAML with the numbers people write, and no key twice.

    In YAML 1.1, which PyYAML reads, 010 is 8, 1:30 is 90, 0x10 is 16, 2024-01-01 is a date, and 1e-6 is a text. Here
    numbers are decimal, 1e-6 is one, and the others are texts, so that a key for a number refuses them.
    """

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        try:
            return int(node.value)
        except ValueError:  # Python converts only so many digits
            raise ConfigError(f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # <<: the mapping behind it, under what stands here
                continue
            name = self.construct_object(key_node, deep=True)
            if isinstance(name, str) and name in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: key {name!r} stands twice in one section")
            seen.add(name if isinstance(name, str) else str(name))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{_INTEGER.pattern})\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` or another reader of YAML would take for something else."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})\Z"), list("-+.0123456789"))


def parse_yaml(text: str) -> Any:
    """Raises ConfigError with what is wrong with the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError("not a recipe: it is nested too deeply") from None
    except (ValueError, KeyError, AttributeError) as error:  # `!!bool maybe`: PyYAML does not check explicit tags
        raise ConfigError(f"not valid YAML: a value that its tag does not admit ({error})") from None


def _read_with_defaults(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    """The file merged over the files its `defaults:` names (relative to it)."""
    if path.resolve() in parents:
        raise ConfigError(f"{path}: defaults form a circle: {' -> '.join(map(str, [*parents, path.resolve()]))}")
    return _over_defaults(_read_yaml(path), path, parents)


def _over_defaults(raw: dict[str, Any], path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    given = raw.pop("defaults", [])
    names = given if isinstance(given, list) else [given]
    merged: dict[str, Any] = {}
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"{path}: defaults = {_shown(given)}: must be the name of a recipe file, or a list of them"
            )
        merged = _merge_file(merged, _read_with_defaults(path.parent / name, (*parents, path.resolve())))
    return _merge_file(merged, raw)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        inside = path / "recipe.yaml"
        hint = f"; a run is resumed by its recipe: {inside}" if inside.is_file() else ""
        raise ConfigError(f"{path}: a folder, not a recipe file{hint}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe file{_nearby_recipes(path)}") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no file can have
        raise ConfigError(f"{path}: cannot be read as a recipe: {error}") from None
    try:
        raw = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, found {type(raw).__name__}")
    return raw


def _nearby_recipes(path: Path) -> str:
    found = sorted(str(file) for file in Path("recipes").glob("*.yaml"))
    near = difflib.get_close_matches(str(path), found, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _merge_file(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A section with `_override_: true` replaces the one beneath it, as in NeMo-RL's files; others are merged."""
    whole = {name for name, value in above.items() if isinstance(value, dict) and value.get("_override_") is True}
    kept = {name: value for name, value in below.items() if name not in whole}
    marked = {name: {k: v for k, v in above[name].items() if k != "_override_"} for name in whole}
    return _merge(kept, {**above, **marked})


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if value == "???" and old is not None:  # OmegaConf's "to be given", which it is by the file beneath
            continue
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _parsed_override(override: str) -> tuple[str, Any]:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        return name, parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"override {_shown(override)}: {error}") from None


def _apply_override(raw: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    here = raw
    for section in sections:
        inner = here.get(section)
        here[section] = dict(inner) if isinstance(inner, dict) else {}
        here = here[section]
    here[last] = value


def _explain(item: Any) -> str:
    """One pydantic error as `key = value: rule`."""
    dotted = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return _unknown_key(dotted)
    if item["type"] == "missing":
        return f"{dotted}: required, but not set"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{dotted}: {message}" if dotted else message
    if item["type"] == "string_type" and isinstance(item["input"], dict):
        message += "; a text in braces needs quotes"
    meaning = next((option.meaning for option in options() if option.name == dotted), "")
    return f"{dotted} = {_shown(item['input'])}: {message}{f' ({meaning})' if meaning else ''}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        return f"(a {type(value).__name__})"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _unknown_key(dotted: str) -> str:
    for name, advice in NEMO_RL_ADVICE.items():
        if dotted == name or dotted.startswith(name + "."):
            return f"{dotted}: not a key of this recipe: {advice}"
    if of_verl := verl_advice(dotted):
        return f"{dotted}: not a key of this recipe: {of_verl}"
    known = [option.name for option in options()]
    near = difflib.get_close_matches(dotted, known, n=1, cutoff=0.0)
    same_leaf = [name for name in known if name.split(".")[-1] == dotted.split(".")[-1]]
    hint = same_leaf[0] if same_leaf else near[0]
    return f"{dotted}: unknown key; nearest: {hint} (all keys: exgrpo options)"


def _walk(section: type[BaseModel], prefix: str, defaults: BaseModel | None = None) -> Iterator[Option]:
    """The keys under a section; `defaults` are the values it has where a recipe leaves the whole section out."""
    for name, field in section.model_fields.items():
        nested = _nested_section(field)
        default = field.default if defaults is None else getattr(defaults, name)
        if nested is not None:
            by_name = "<name>." if get_origin(field.annotation) is dict else ""
            yield from _walk(nested, f"{prefix}{name}.{by_name}", default if isinstance(default, BaseModel) else None)
        else:
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            yield Option(prefix + name, _default_text(default), unit, _meaning(field))


def _meaning(field: FieldInfo) -> str:
    """The description, and the values of a key that admits only some and does not explain each."""
    meaning = field.description or ""
    choices = [value for value in _literals(field.annotation) if isinstance(value, str)]
    if not choices or all(choice in meaning for choice in choices):
        return meaning
    return f"{meaning}; one of {', '.join(choices)}"


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literals(part)]


def _nested_section(field: FieldInfo) -> type[BaseModel] | None:
    for candidate in _alternatives(field.annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _alternatives(annotation: Any) -> Iterable[Any]:
    return get_args(annotation) or (annotation,)


def _default_text(default: Any) -> str:
    return "required" if default is PydanticUndefined or default is ... else yaml_text(default)


def yaml_text(value: Any) -> str:
    """A value on one line as a recipe would have it: `true`, `null`, `[2, 3]`."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
