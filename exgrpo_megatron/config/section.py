"""What every section of the recipe is made of: checked types, and keys that carry their meaning and unit."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What torch's generators take."""
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
Name = Annotated[str, Field(min_length=1)]
"""Of a file, folder, column or the like."""

_FUNCTION = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")


def _names_a_function(value: str) -> str:
    if not _FUNCTION.fullmatch(value):
        raise ValueError(f"{value!r} is not package.module:function, nor path/of/file.py:function")
    return value


FunctionName = Annotated[str, AfterValidator(_names_a_function)]
"""Where a function of the user's stands: `package.module:function`, or `path/of/file.py:function`."""


class Section(BaseModel):
    """Frozen; unknown keys are refused, and so is `true` or `false` where a number is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        # Python's True is an int, and pydantic would read it as 1.
        given = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(item, bool) for item in given):
            admitted = _leaf_types(cls.model_fields[info.field_name or ""].annotation)
            if admitted & {int, float} and bool not in admitted:
                raise PydanticCustomError("bool_for_number", "Input should be a number, not true or false")
        return value


def _leaf_types(annotation: Any) -> set[type]:
    """The plain types an annotation is made of; a literal counts as the type of its values."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) is Annotated:
        return _leaf_types(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        return {annotation}
    return {leaf for part in get_args(annotation) for leaf in _leaf_types(part)}


def key(default: Any, meaning: str, unit: str = "") -> Any:
    """A recipe key with its default, meaning and unit (shown by `exgrpo options`)."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit})
