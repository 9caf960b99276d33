"""Which choices of the objective make sense together; both a config and the loss itself refuse the others."""

from __future__ import annotations

RATIOS = ("token", "sequence", "sequence_token", "trajectory")

ALLOWED_RATIOS: dict[str, tuple[str, ...]] = {
    "clip": RATIOS,
    "cispo": ("token", "sequence", "trajectory"),
    "sapo": RATIOS,
    "reinforce": ("token",),
    "gmpo": ("token",),
    "clip_cov": ("token", "sequence_token"),
    "kl_cov": ("token", "sequence_token"),
}
"""The ratios that a surrogate takes."""

COVARIANCE_SURROGATES = ("clip_cov", "kl_cov")

_WHY_NOT = {
    "cispo": "cispo takes no gradient through the ratio, and sequence_token differs from sequence in that alone",
    "reinforce": "reinforce has no ratio",
    "gmpo": "gmpo takes the geometric mean of the tokens' own ratios",
    "clip_cov": "a selected token has no gradient to lose where the ratio is the whole completion's",
    "kl_cov": "tokens are selected and penalised one by one, and the ratio is the whole completion's",
}


def check_surrogate(
    surrogate: str,
    ratio: str,
    *,
    clip_high: float,
    delta: float | None = None,
    dual_clip: float | None = None,
    where: str = "",
) -> None:
    """Refuse a surrogate, ratio and bounds that make no sense together; ``where`` stands before field names.

    Raises:
        ValueError: naming the field, its value and the reason.
    """
    if surrogate not in ALLOWED_RATIOS:
        raise ValueError(f"{where}surrogate must be one of {list(ALLOWED_RATIOS)}, got {surrogate!r}")
    if ratio not in RATIOS:
        raise ValueError(f"{where}ratio must be one of {list(RATIOS)}, got {ratio!r}")
    if ratio not in ALLOWED_RATIOS[surrogate]:
        raise ValueError(
            f"{where}ratio must be one of {list(ALLOWED_RATIOS[surrogate])} for {where}surrogate={surrogate!r}, "
            f"got {ratio!r}: {_WHY_NOT[surrogate]}"
        )
    for name, value in (("delta", delta), ("dual_clip", dual_clip)):
        if value is not None and surrogate != "clip":
            raise ValueError(
                f"{where}{name} must be None for {where}surrogate={surrogate!r}, got {value}: only 'clip' has it"
            )
    if delta is not None and not delta > 1 + clip_high:
        raise ValueError(
            f"{where}delta must be above 1 + {where}clip_high ({1 + clip_high:g}), got {delta}: "
            "it bounds the ratio beyond the clip"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"{where}dual_clip must be above 1, got {dual_clip}: on-policy losses would be clipped")


def check_kl(estimator: str, unbiased: bool, *, where: str = "") -> None:
    """Refuse the ratio-weighted KL with an estimator whose gradient it would spoil.

    Raises:
        ValueError: naming the field, its value and the reason.
    """
    if unbiased and estimator not in ("k1", "k3"):
        raise ValueError(
            f"{where}kl_estimator must be 'k1' or 'k3' for {where}kl_unbiased, got {estimator!r}: "
            "its gradient is that of the divergence without the ratio"
        )
