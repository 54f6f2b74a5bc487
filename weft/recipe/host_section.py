"""Sections whose techniques bring settings of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, ValidationInfo, field_validator

from weft.registry import KINDS, Registered, check_name, declared, find, names
from weft.section import Section

S = TypeVar("S", bound="Section")


class HostSection(Section):
    """Base of sections that name techniques and also contain the settings of these techniques.

    ``hosts``: for each field of the section that names a technique, the kind of technique. For example, the section
    ``[optimizer]`` has the field ``kind``, which names an optimizer. With ``kind = "muon"`` the section also has the
    settings of Muon. :meth:`with_settings` creates the class with the fields of both.
    """

    hosts: ClassVar[Mapping[str, str]] = {}

    @field_validator("*")
    @classmethod
    def _is_known(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a name that no technique has."""
        kind = cls.hosts.get(info.field_name or "")
        if kind is not None:
            check_name(kind, value)
        return value

    @classmethod
    def with_settings(cls, values: Mapping[str, Any]) -> type[Self]:
        """Return the subclass of this section that also has the fields of the techniques that ``values`` name.

        ``values``: the section's settings by key. Returns this class if no named technique has settings of its own.
        """
        bases: list[type[Section]] = []
        for name, kind in cls.hosts.items():
            value = values.get(name, cls.model_fields[name].default)
            if isinstance(value, str) and value in names(kind):
                settings = find(kind, value).settings
                if settings is not None and not issubclass(cls, settings):
                    bases.append(settings)
        bases += cls.more_settings(values)
        return _combined(cls, tuple(bases)) if bases else cls

    @classmethod
    def more_settings(cls, values: Mapping[str, Any]) -> tuple[type[Section], ...]:
        """Return section classes whose fields this section also has if its settings are ``values``; in most sections
        there are none.
        """
        return ()

    @classmethod
    def split(cls, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Divide ``values``, settings by key, into ``(used, unused)``.

        ``unused`` has the settings that belong only to techniques that ``values`` do not name. ``used`` has all other
        settings, and also unknown keys.
        """
        fields = cls.with_settings(values).model_fields
        known = {*fields, *(field.alias for field in fields.values())}
        others = {key: value for key, value in values.items() if key not in known}
        unused = {key: value for key, value in others.items() if cls.owners(key)}
        return {k: v for k, v in values.items() if k not in unused}, unused

    @classmethod
    def owners(cls, key: str) -> list[Registered]:
        """Return the techniques that this section could name and that have a setting called ``key``."""
        return [t for t, settings in cls._possible() if key in settings.model_fields]

    @classmethod
    def technique_settings(cls) -> list[str]:
        """Return the keys of the settings of all techniques that this section could name."""
        return [key for _, settings in cls._possible() for key in settings.model_fields]

    @classmethod
    def _possible(cls) -> Iterator[tuple[Registered, type[Section]]]:
        """Yield the techniques that this section could name, each with its settings; not those without any."""
        for kind in cls.hosts.values():
            for technique in declared(kind):
                if technique.settings is not None:
                    yield technique, technique.settings

    def own(self, settings: type[S]) -> S:
        """Return this section itself, with the type ``settings`` for type checkers.

        ``settings``: the class of the settings of a technique that the section names.
        """
        assert isinstance(self, settings)
        return self

    def named(self) -> Iterator[Registered]:
        """Yield the techniques that this section names."""
        for name, kind in self.hosts.items():
            if (value := getattr(self, name)) in names(kind):
                yield find(kind, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by values, as combined classes have no name that another process could import."""
        return section_of, (type(self).hosting(), self.model_dump(by_alias=True))

    @classmethod
    def hosting(cls) -> type[HostSection]:
        """Return the class of this section as declared, without the settings of techniques."""
        return next(base for base in cls.__mro__ if "hosts" in vars(base))


@cache
def _combined(section: Any, settings: tuple[type[Section], ...]) -> Any:
    """Return a class with the fields of a section and of its techniques' settings."""
    about = {"__module__": section.__module__, "__doc__": section.__doc__}
    return type(section)(section.__name__, (section, *settings), about)


def section_of(section: type[HostSection], values: Any) -> Any:
    """Validate the dictionary ``values`` as a ``section`` that also has the settings of the techniques that it names.

    Any value that is not a dictionary is returned unchanged. Settings of techniques that are not named are left out;
    :func:`unused_settings` lists those.
    """
    if not isinstance(values, Mapping):
        return values
    used, _ = section.split(values)
    return section.with_settings(used).model_validate(used)


def with_techniques(section: type[HostSection]) -> BeforeValidator:
    """Return a pydantic validator for a field of type ``section``, which adds the settings of named techniques."""
    return BeforeValidator(lambda values: section_of(section, values))


def unused_settings(
    name: str, section: type[HostSection], values: Mapping[str, Any]
) -> list[str]:
    """Return a line for each setting in ``values`` that belongs only to techniques that ``values`` do not name.

    ``name``: the section's name for these lines. ``section``: its class. Settings at their default values are not
    reported.
    """
    lines = []
    for key, value in section.split(values)[1].items():
        owners = section.owners(key)
        if any(
            o.settings.model_fields[key].default == value for o in owners if o.settings
        ):
            continue
        of = ", ".join(repr(owner.name) for owner in owners)
        what = KINDS[owners[0].kind]
        field = what.setting.rpartition(".")[2]
        asked = values.get(field, section.model_fields[field].default)
        lines.append(
            f"{name}.{key} = {value!r} is not used: it is a setting of {of}, and {what.setting} = {asked!r}"
        )
    return lines
