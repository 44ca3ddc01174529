"""`attn_implementation="tilewise"` (and, in continuous batching, `"tilewise_flash"`) for Hugging Face transformers.

    from tilewise.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

Two names, one implementation: transformers takes a name that contains "flash" as one that needs no mask in continuous
batching and reads packed sequences from positions, and every other name (from release 5.19 on) as one that cannot do
either. Importing this module changes nothing. docs/migration.md says what each argument becomes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from tilewise.errors import InvalidProblem, Unsupported
from tilewise.integrations.transformers.latents import absorb, attend, latent_cache
from tilewise.integrations.transformers.masks import attention_mask_function
from tilewise.integrations.transformers.routing import FLASH_NAME, NAME, watch

__all__ = ["FLASH_NAME", "NAME", "absorb", "latent_cache", "register"]

# The oldest release whose keyword arguments are known and tested, and the first that has no `paged|` prefix.
OLDEST, UNPREFIXED = (5, 17), (5, 19)


def register(*, ignore: Iterable[str] = ()) -> None:
    """Offer tilewise to transformers under the names "tilewise" and "tilewise_flash"; may be called again.

    A keyword argument that a model hands to its attention and tilewise does not know raises; names in `ignore` are
    dropped instead, for models whose extra arguments do not change attention. Rejects releases before 5.17; raises
    ModuleNotFoundError where transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        fix = "pip install 'tilewise[transformers]'"
        raise ModuleNotFoundError(f"transformers is not installed: {fix}", name="transformers") from error
    release = _release(transformers.__version__)
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise Unsupported(f"transformers {transformers.__version__} is older than {oldest}; upgrade transformers")
    if isinstance(ignore, str):  # which would be a collection of letters
        raise InvalidProblem("ignore", "a collection of names", repr(ignore), f"Pass [{ignore!r}].")
    # What `generate` is asked for (tokens, beams, outputs): some models pass it on to their attention.
    settings = vars(transformers.GenerationConfig()).keys() - {"output_attentions"}
    names = frozenset(ignore) | settings
    for name in (NAME, FLASH_NAME):
        forward = functools.partial(attend, ignore=names, as_flash=name == FLASH_NAME)
        transformers.AttentionInterface.register(name, forward)
        transformers.AttentionMaskInterface.register(name, attention_mask_function)
        if release < UNPREFIXED:
            # No mask function: the packed arguments of continuous batching say it all.
            transformers.AttentionInterface.register(f"paged|{name}", forward)
    watch()


def _release(version: str) -> tuple[int, ...]:
    """(5, 17) of "5.17.0.dev0"."""
    return tuple(int(part) for part in version.split(".")[:2])
