"""What every section of the configuration is: frozen, strict, checked; and the kinds of numbers in them."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
# YAML reads the list 0,1 of devices as text, but the list 0 as a number
DeviceList = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


class Settings(BaseModel):
    """Base of every section: immutable, no unknown keys, defaults checked like given values."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1, and nobody who writes `epochs: true` means one epoch
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError("must not be true or false")
        return value
