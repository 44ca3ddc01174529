"""Inputs for a model, by the names that its forward takes.

Models do not say what form their pictures and sounds have, so the forms that exist are tried with eager attention until
one is taken. Text comes without padding and with padding on either side, then with a picture, a video or a sound in it
where the model takes one.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo.overrides import INPUTS
from zoo.tiny import FIRST_WORD, HIDDEN, VOCABULARY, NotBuilt, first_line

__all__ = ["Batch", "batches", "words"]

BATCH, SEQLEN, PADDED, TARGET = 2, 13, 5, 7
FRAMES, SAMPLES = 64, 4000

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Batch:
    """`arguments` of forward; `valid` (batch, positions) marks what is not padding, where there is any.

    A model that shortens its input (sounds) has fewer positions in its output.
    """

    case: str
    arguments: Arguments
    valid: Tensor | None = None
    shortened: bool = False

    def to(self, dtype: torch.dtype) -> Batch:
        """The same with numbers of this type."""
        converted = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.arguments.items()
        }
        return dataclasses.replace(self, arguments=converted)

    def changed(self, where: Tensor) -> Batch:
        """The same with other words at these positions."""
        ids = self.arguments["input_ids"]
        others = FIRST_WORD + (ids - FIRST_WORD + 17) % (VOCABULARY - FIRST_WORD)
        where = where.view(*where.shape, *[1] * (ids.dim() - 2))
        return dataclasses.replace(self, arguments=self.arguments | {"input_ids": torch.where(where, others, ids)})


def words(batch: int, seqlen: int, seed: int = 0) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(FIRST_WORD, VOCABULARY, (batch, seqlen), generator=_generator(seed))


def batches(model: Any) -> list[Batch]:
    """What to call this model with."""
    if "forward" not in {
        name for part in type(model).__mro__[:-2] for name in vars(part) if part is not torch.nn.Module
    }:
        return []  # its parts are called one by one
    takes = _takes(model.forward)
    first = _first_that_runs(model, _plain(model, takes))
    found = [Batch("plain", first)]
    if "attention_mask" in takes and "input_ids" in first:
        found += _padded_text(first)
    elif "attention_mask" in takes and "input_values" in first and first["input_values"].shape[1] == SAMPLES:
        found += _padded_sound(first)
    for kind, features in _features(model).items():
        found += _mixed(model, kind, features, first)
    return found


def _padded_text(first: Arguments) -> list[Batch]:
    ids = first["input_ids"]
    found = []
    for side, hidden in (("left", slice(0, PADDED)), ("right", slice(ids.shape[1] - PADDED, ids.shape[1]))):
        mask = torch.ones(ids.shape[:2], dtype=torch.long)
        mask[0, hidden] = 0
        found.append(Batch(side, first | {"attention_mask": mask}, mask.bool()))
    return found


def _padded_sound(first: Arguments) -> list[Batch]:
    mask = torch.ones(first["input_values"].shape, dtype=torch.long)
    mask[0, 2 * mask.shape[1] // 3 :] = 0
    return [Batch("right", first | {"attention_mask": mask}, mask.bool(), shortened=True)]


def _takes(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _first_that_runs(model: Any, candidates: Iterator[Arguments]) -> Arguments:
    failures = []
    for arguments in candidates:
        failure = _failure(model, arguments)
        if failure is None:
            return arguments
        failures.append(failure)
    raise NotBuilt(f"no input found for it: {failures[0] if failures else 'none known'}")


def _failure(model: Any, arguments: Arguments) -> str | None:
    try:
        with torch.no_grad():
            model(**arguments)
    except Exception as error:
        return first_line(error)
    return None


def _plain(model: Any, takes: Mapping[str, inspect.Parameter]) -> Iterator[Arguments]:
    """Arguments to try: words alone if the model takes words, then together with the other inputs it names."""
    config = model.config
    given = INPUTS.get(config.model_type)
    if given is not None:
        yield given(config, words)
    required = {
        name for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }  # fmt: skip
    wanted = required | (ALWAYS & takes.keys())
    fixed = {name: make(config) for name, make in BY_NAME.items() if name in wanted}
    if "input_ids" in takes:
        fixed["input_ids"] = words(BATCH, SEQLEN)
    if "decoder_input_ids" in takes:
        fixed["decoder_input_ids"] = words(BATCH, TARGET, seed=1)
    if fixed and required <= fixed.keys():
        yield fixed
    for kind in (_pictures, _sounds):
        for form in kind(config, takes):
            yield fixed | form
            if "input_ids" in fixed and "input_ids" not in required:
                yield {name: value for name, value in (fixed | form).items() if name != "input_ids"}


def _features(model: Any) -> dict[str, Any]:
    """How a model of words turns pictures and sounds into what stands between the words."""
    found: dict[str, Any] = {}
    for kind in ("image", "video", "audio"):
        for owner in (model, getattr(model, "model", None)):
            method = getattr(owner, f"get_{kind}_features", None)
            if method is not None and _token(model.config, kind) is not None:
                found.setdefault(kind, method)
    return found


def _token(config: Any, kind: str) -> int | None:
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def _mixed(model: Any, kind: str, features: Any, first: Arguments) -> list[Batch]:
    """Rows of words with a picture, a video or a sound in them; the first row is padded on the left."""
    takes, forward = _takes(features), _takes(model.forward)
    if all(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in takes.values()):
        takes = forward
    token: Any = _token(model.config, kind)
    forms = _sounds if kind == "audio" else _pictures
    for form in forms(model.config, takes):
        try:
            with torch.no_grad():
                counts = _counts(features(**form))
        except Exception:
            continue
        if counts is None:
            continue
        seqlen = SEQLEN + max(counts)
        ids = words(BATCH, seqlen)
        mask = torch.ones_like(ids)
        mask[0, :PADDED] = 0
        for row, count in enumerate(counts):
            ids[row, PADDED + 2 : PADDED + 2 + count] = token
        arguments = {name: value for name, value in first.items() if name == "decoder_input_ids"} | form
        arguments |= {"input_ids": ids, "attention_mask": mask}
        if kind == "video" and "pixel_values" in arguments and "pixel_values_videos" in forward:
            arguments["pixel_values_videos"] = arguments.pop("pixel_values")
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in forward:
                arguments[name] = ids.eq(token).long() * (2 if kind == "video" else 1)
        if _failure(model, arguments) is None:
            return [Batch(kind, arguments, mask.bool())]
    return []


def _counts(features: Any) -> list[int] | None:
    """How many tokens each row's picture takes."""
    for name in ("pooler_output", "last_hidden_state"):
        if hasattr(features, name) and getattr(features, name) is not None:
            features = getattr(features, name)
            break
    if isinstance(features, (list, tuple)) and len(features) == BATCH and all(isinstance(f, Tensor) for f in features):
        return [part.flatten(0, -2).shape[0] for part in features]
    if isinstance(features, (list, tuple)) and features and isinstance(features[0], Tensor):
        features = features[0]
    if not isinstance(features, Tensor) or features.dim() < 2:
        return None
    rows = features.flatten(0, -2).shape[0]
    return [rows // BATCH] * BATCH if rows % BATCH == 0 else None


def _pictures(config: Any, takes: Mapping[str, Any]) -> Iterator[Arguments]:
    """Forms of pictures and videos, for arguments of these names."""
    name = next(
        (n for n in ("pixel_values", "pixel_values_images", "pixel_values_videos", "hidden_states") if n in takes), None
    )
    if name is None:
        return
    vision = _part(config, "vision_config", "encoder", "backbone_config", "image_config") or config
    channels = next((c for c in (_get(vision, "num_channels"), _get(vision, "in_channels")) if isinstance(c, int)), 3)
    height, width = _pair(_get(vision, "image_size") or 32)
    patch = _pair(_get(vision, "patch_size") or 8)[0]
    grid = next((n for n in ("grid_thw", "image_grid_thw", "video_grid_thw") if n in takes), None)
    if grid is not None:
        for depth in dict.fromkeys((_get(vision, "temporal_patch_size") or 1, 1, 2)):
            for frames in (2, 1) if name == "pixel_values_videos" else (1,):
                patches = _noise(BATCH * frames * 16, channels * depth * patch * patch)
                yield {name: patches, grid: torch.tensor([[frames, 4, 4]] * BATCH)}
                four = patches.unflatten(1, (-1, patch, patch))
                yield {name: four, grid: torch.tensor([[frames, 4, 4]] * BATCH)}
    extra = {"image_sizes": torch.tensor([[height, width], [height, width // 2]])} if "image_sizes" in takes else {}
    even = {"image_sizes": torch.tensor([[height, width]] * BATCH)} if extra else {}
    picture = _noise(BATCH, channels, height, width)
    if "high_res_pixel_values" in takes:
        yield {name: picture, "high_res_pixel_values": picture.flip(0)}
    if extra:
        yield {name: picture, **extra}
        # A picture as a whole and in four quarters.
        large = torch.tensor([[2 * height, 2 * width]] * BATCH)
        yield {name: _noise(BATCH, 5, channels, height, width), "image_sizes": large}
    yield {name: picture, **even}
    yield {name: picture[:, None], **even}
    frames = _get(vision, "num_frames") or _get(vision, "frames_per_clip") or _get(config, "num_frames") or 2
    yield {name: _noise(BATCH, frames, channels, height, width), **even}
    flat = _noise(BATCH, 16, channels * patch * patch)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
    for position in ("pixel_position_ids", "image_position_ids", "video_position_ids"):
        if position in takes:
            yield {name: flat, position: places.expand(BATCH, 16, 2)}
    if "spatial_shapes" in takes:
        shapes = torch.tensor([[4, 4], [4, 2]])
        mask = torch.ones(BATCH, 16, dtype=torch.long)
        mask[1, 8:] = 0
        yield {name: flat, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    yield {name: flat}


def _sounds(config: Any, takes: Mapping[str, Any]) -> Iterator[Arguments]:
    """Forms of sounds, for arguments of these names."""
    audio = (
        _part(config, "audio_config", "encoder_config", "speech_encoder_config", "audio_encoder", "encoder") or config
    )
    if "input_values" in takes:
        yield {"input_values": _noise(BATCH, SAMPLES)}
        yield {"input_values": _noise(BATCH, 1, SAMPLES)}
    name = next((n for n in ("input_features", "input_values", "audio_mel") if n in takes), None)
    if name is None:
        return
    mask = next((n for n in ("input_features_mask", "feature_attention_mask", "audio_mel_mask") if n in takes), None)
    positions = _get(audio, "max_source_positions") or FRAMES
    seen = set()
    stated = [_get(part, key) for part in (audio, config) for key in MEL]
    for bins in [*stated, 4 * (stated[0] or 0), 80, 128]:
        if not isinstance(bins, int) or bins < 2 or bins in seen:
            continue
        seen.add(bins)
        for frames in dict.fromkeys((FRAMES, 2 * positions, 100)):
            for shape in ((BATCH, bins, frames), (BATCH, frames, bins), (BATCH, 1, frames, bins)):
                form: Arguments = {name: _noise(*shape)}
                if mask is not None:
                    yield form | {mask: torch.ones(BATCH, frames, dtype=torch.bool)}
                    yield form | {mask: torch.ones(BATCH, frames, dtype=torch.long)}
                yield form


MEL = (
    "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", "mel_bins", "feature_projection_input_dim",
    "input_feat_size", "n_mels", "input_size",
)  # fmt: skip


def _boxes(config: Any) -> Tensor:
    corners = torch.randint(0, 30, (BATCH, SEQLEN, 2), generator=_generator(3))
    return torch.cat([corners, corners + 20], -1)


def _hidden_states(config: Any) -> Tensor:
    return _noise(BATCH, SEQLEN, _get(config, "hidden_size") or HIDDEN)


# Arguments by name, made where forward requires them, and those in ALWAYS where it takes them.
BY_NAME: dict[str, Callable[[Any], Any]] = {
    "bbox": _boxes,
    "query_embeds": _hidden_states,
    "inputs_embeds": _hidden_states,
    "qformer_input_ids": lambda _: words(BATCH, SEQLEN, seed=4),
    "visual_feats": lambda config: _noise(BATCH, 4, config.visual_feat_dim),
    "visual_pos": lambda config: _noise(BATCH, 4, config.visual_pos_dim),
}
ALWAYS = {"bbox", "visual_feats", "visual_pos"}


def _part(config: Any, *names: str) -> Any:
    for name in names:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            return part
    return None


def _get(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def _noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
