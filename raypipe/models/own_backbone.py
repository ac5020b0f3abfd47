"""Backbones of a user's own code: file:package.module:factory.

Security: a factory must be annotated to return an nn.Module. A model package names its factory, and
loading the package calls it; so a package cannot name any other function.

How such code is packed with its weights: own_code.py.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_type_hints

from torch import nn

from raypipe.errors import ConfigError
from raypipe.models.backbones import Backbone


def own(name: str, options: dict[str, Any]) -> Backbone:
    """file:… A class, or a function that is annotated to return an nn.Module."""
    module, _, attribute = name.partition(":")
    if module == "__main__":
        raise ConfigError(
            "A model's factory lies in a notebook or a script",
            got=f"file:{name}",
            rule="Workers and readers of the package import it by name",
            fix="Put it into a .py file of its own, and name that: file:module:factory",
        )
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"The model's factory cannot be imported: {e}",
            got=f"file:{name}",
            rule="It is file:package.module:factory, importable on every worker",
            fix="Put its folder on PYTHONPATH, or install it",
        ) from None
    # Refuse everything else before it is called: see Security above.
    returned = factory if inspect.isclass(factory) else _return_type(factory)
    if not (inspect.isclass(returned) and issubclass(returned, nn.Module)):
        raise ConfigError(
            "A factory says that it returns an nn.Module",
            got=f"file:{name}",
            fix="Annotate it: -> nn.Module",
        )

    _require_callable(factory, name, options)

    def build(pretrained: bool) -> nn.Module:
        return factory(pretrained=pretrained, **options)

    return Backbone(build, None, mean=0.5, std=0.5, side_px=224)


def _require_callable(factory: Any, name: str, options: dict[str, Any]) -> None:
    """Raise ConfigError for a factory that does not take `pretrained` and these options."""
    try:
        inspect.signature(factory).bind(pretrained=True, **options)
    except ValueError:
        return  # it does not say what it takes
    except TypeError as e:
        raise ConfigError(
            f"The factory does not take these arguments: {e}",
            got=f"file:{name}",
            rule="It is called with pretrained and with model.options, by name",
            fix="def factory(pretrained: bool, **options) -> nn.Module, or correct model.options",
        ) from None


def _return_type(function: Any) -> Any:
    """The annotated type; None where there is none, or it cannot be read."""
    try:
        return get_type_hints(function).get("return")
    except (TypeError, NameError):
        return None
