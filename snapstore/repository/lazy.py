"""An attribute that is computed when it is first asked for, and holds nobody else up meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["lazy"]

_Owner = TypeVar("_Owner")
_Value = TypeVar("_Value")


class lazy(Generic[_Owner, _Value]):  # noqa: N801 - used as a decorator
    """What `functools.cached_property` is, without its lock.

    Up to Python 3.11 that lock is one for all objects of a class: a pull that waits for a slow
    layout would stop every other pull of the process. Without it two threads may compute the same
    value at once; both get the one that was there first.
    """

    def __init__(self, compute: Callable[[_Owner], _Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type[_Owner]) -> Self: ...

    @overload
    def __get__(self, owner: _Owner, kind: type[_Owner]) -> _Value: ...

    def __get__(self, owner: _Owner | None, kind: type[_Owner]) -> Self | _Value:
        """Compute and keep the value; from then on Python finds it without coming here."""
        if owner is None:
            return self
        value: _Value = vars(owner).setdefault(self._name, self._compute(owner))
        return value
