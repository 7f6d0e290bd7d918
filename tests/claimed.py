"""Figures on which every claim holds, and what each claim's statistic gives on them, in the order of `CLAIMS`."""

from dmsae.config import Json
from dmsae.experiments.parts.regime import ANY, HOLDING


def row(sae: str, **figures: object) -> Json:
    return {"sae": sae, "fve": None, "price": None, **figures}


BENCHMARKED = (
    ("fidelity", "fve"),
    ("splice", "loss_recovered_zero"),
    ("probing", "accuracy.1"),
    ("probing", "accuracy.5"),
    ("absorption", "fraction"),
    ("disentanglement", "score"),
    ("concept_removal", "scr.20"),
    ("concept_removal", "tpp.20"),
    ("lexical_predictability", "lexical_predictability"),
)
SCORED = {
    "dense": (2, 0.1, (4, 8, 16)),
    "sparse": (2, 0.095, (4, 8, 16)),
    "detector": (1, 0.2, (4, 8, 16)),
    "msae": (0, 0.0, (4, 8, 16, 20)),
    "random-norm_matched-dense": (3, 0.04, (4, 16)),
    "random-norm_matched-sparse": (2, 0.04, (4, 16)),
    "random-detector": (1, 0.04, (4, 16)),
}
"""SAEs of the benchmark: their L0 beyond k, what they score beyond an MSAE, and their k."""
PLANTED: dict[str, Json] = {
    "random-core": {
        "rows": [
            row(f"{source}-k{k}-norm-{norm}{more}", k=k, norm=norm, tokens=20 if more else 10)
            for k, norm, more in (
                (4, "unit", ""),
                (4, "found", ""),
                (4, 2.0, ""),
                (8, "found", ""),
                (4, "found", "-tokens-20"),
            )
            for source in ("dense", "random-norm_matched-dense", "random-covariance_matched-dense")
        ],
        "curves": {
            "random-covariance_matched-dense-k4-norm-found": {"l0_core": [10, 4.5]},
            "random-covariance_matched-dense-k8-norm-found": {"l0_core": [10, 3]},
            "dense-k4-norm-unit": {"l0_core": [10, 10]},
            "random-norm_matched-dense-k4-norm-unit": {"l0_core": [10, 3.5]},
            "dense-k4-norm-found": {"l0_core": [10, 9]},
            "random-norm_matched-dense-k4-norm-found": {"l0_core": [10, 2]},
            "dense-k4-norm-2.0": {"l0_core": [10, 6]},
            "random-norm_matched-dense-k4-norm-2.0": {"l0_core": [10, 1]},
            "dense-k8-norm-found": {"l0_core": [10, 8]},
            "random-norm_matched-dense-k8-norm-found": {"l0_core": [10, 4]},
            "dense-k4-norm-found-tokens-20": {"l0_core": [10, 8]},
            "random-norm_matched-dense-k4-norm-found-tokens-20": {"l0_core": [10, 1]},
        },
    },
    "cycles": {
        "cycles": [
            {"run": f"{mode}-{start}", "cycle": cycle, "size": 10, "of_first": of_first}
            for mode in ("dense", "detector")
            for start, kept in (("selected", 8), ("random", 3))
            for cycle, of_first in ((0, 10), (1, kept))
        ]
    },
    "sparsity": {
        "cycles": [{"k": k, "size": 10, "kept": kept} for k, last in ((1, 2), (2, 9), (4, 3)) for kept in (0, last)],
    },
    "tau": {
        "rows": [row(f"coverage-{c}", coverage=c, fve=f) for c, f in ((0.1, 0.5), (0.9, 0.8), (1.0, 0.803))],
        "curves": {"0.1": {"loss": [4.0, 3.0]}, "0.9": {"loss": [3.0, 2.0]}, "1": {"loss": [2.0, 2.5]}},
    },
    "paper": {
        "rows": [
            row("dense-k4", price=-0.01, price_loss=-0.03),
            row("random-norm_matched-dense-k4", price=0.2),
            row("random-covariance_matched-dense-k4", price=0.1),
            row("detector-k4", price=0.001, price_loss=0.004),
            row("random-detector-k4", price=0.081),
        ]
    },
    "longer": {"price": 0.002, "price_loss": 0.003},
    "capped": {
        "rows": [
            row("detector-k4", price=0.01),
            row("random-detector-k4", price=0.1),
            row("firing_rate-detector-k4", price=0.03),
            row("mean_activation-detector-k4", price=0.035),
            row("random_subset-detector-k4", price=0.04),
            row("principal_components-detector-k4", price=0.06),
        ]
    },
    "consistency": {
        "pairs": [
            {
                "what": what,
                "tokens": tokens,
                "sizes": [4, 4],
                "share_found": share if tokens == 20 else 0.0,
                "encoder_cosine": share + 0.1 - late / tokens,
                "decoder_cosine": share - 0.1 - late / tokens,
            }
            for tokens in (10, 20, 40)
            for what, share in (
                ("prefix-0", 0.2),
                ("first core, capped", 0.3),
                ("distilled, detector", 0.5),
                ("distilled, dense", 0.45),
                ("random rows", 0.0),
                ("random rows for distilled, dense", 0.05),
                ("random rows for distilled, detector", 0.15),
                ("random rows for consensus", 0.1),
                ("consensus", 0.6),
                ("the rest beside distilled detectors", 0.3),
                ("the rest beside a distilled dense core", 0.25),
                ("the rest beside detectors of the first core", 0.28),
                ("the rest beside a consensus", 0.22),
                ("the rest beside random detectors", 0.27),
                ("the rest beside random directions", 0.21),
                ("the same without a core", 0.2),
            )
            for late in (0 if what.startswith("random rows") else 2,)
            if tokens < 40 or what == "prefix-0"
        ]
    },
    "benchmark": {
        "rows": [row(f"{name}-k{k}", l0=k + extra) for name, (extra, _, ks) in SCORED.items() for k in ks],
        "scores": [
            {"sae": f"{name}-k{k}", "measure": measure, "figure": figure, "ceiling": ceiling, "score": score}
            for measure, figure in BENCHMARKED
            for ceiling in (0 if measure == "absorption" else 1,)
            for name, (extra, gain, ks) in SCORED.items()
            for k in ks
            for score in (0.5 + 0.01 * (k + extra) + (gain if ceiling else -gain),)
        ]
        + [
            {
                "sae": f"{name}-k{k}",
                "measure": "detection",
                "figure": "detection_balanced",
                "ceiling": 1,
                "score": score,
            }
            for name, k, score in (
                ("dense", 8, 0.6),
                ("dense", 16, 0.9),
                *(("msae", k, 0.67) for k in SCORED["msae"][2]),
            )
        ],
    },
    "worth": {
        "rows": [
            row("detector-k4", l0=4.1),
            row("random-detector-k4", l0=4.0),
            row("dense-k4", l0=9.1),
            row("random-norm_matched-dense-k4", l0=9.0),
        ],
        "scores": [
            {"sae": f"{name}-k4", "measure": measure, "figure": figure, "ceiling": ceiling, "score": score}
            for measure, figure in BENCHMARKED
            for ceiling in (0 if measure == "absorption" else 1,)
            for name, score in (
                ("detector", 0.6 if ceiling else 0.3),
                ("random-detector", 0.5 if ceiling else 0.4),
                ("dense", 0.7 if ceiling else 0.2),
                ("random-norm_matched-dense", 0.45),
            )
        ],
    },
    "uncapped": {
        "rows": [
            row(f"{name}-k4", price=price)
            for name, price in (
                ("dense", 0.1),
                ("firing_rate-dense", 0.15),
                ("mean_activation-dense", 0.13),
                ("random_subset-dense", 0.14),
                ("sparse", 0.01),
                ("random-norm_matched-sparse", 0.04),
                ("firing_rate-sparse", 0.02),
                ("mean_activation-sparse", 0.05),
                ("random_subset-sparse", 0.03),
                ("principal_components-dense", 0.17),
            )
        ]
    },
    "prices": {
        "priced_cycles": [2, 4],
        "rows": [
            row(f"after-{cycles}-{name}-k4", price=price + 0.001 * cycles * i)
            for cycles in (2, 4)
            for i, (name, price) in enumerate(
                (
                    ("dense", 0.1),
                    ("random-norm_matched-dense", 0.3),
                    ("firing_rate-dense", 0.15),
                    ("random_subset-dense", 0.14),
                    ("sparse", 0.01),
                    ("random-norm_matched-sparse", 0.04),
                    ("firing_rate-sparse", 0.02),
                    ("random_subset-sparse", 0.03),
                    ("detector", 0.02),
                    ("random-detector", 0.12),
                    ("firing_rate-detector", 0.05),
                    ("random_subset-detector", 0.04),
                    ("principal_components-dense", 0.13),
                    ("mean_activation-dense", 0.16),
                    ("mean_activation-sparse", 0.07),
                    ("mean_activation-detector", 0.06),
                    ("random-covariance_matched-dense", 0.2),
                    ("random-covariance_matched-sparse", 0.08),
                )
            )
        ],
    },
    "confirmation": {
        "chosen": {ANY: "small", HOLDING: "large"},
        "regimes": [
            {
                "regime": "small",
                "margins": {
                    "firing_rate": 0.03,
                    "mean_activation": 0.031,
                    "random_subset": 0.032,
                    "random-norm_matched": 0.033,
                    "random-covariance_matched": 0.034,
                    "principal_components": 0.035,
                },
                "price": -0.015,
            },
            {
                "regime": "large",
                "margins": {
                    "firing_rate": 0.02,
                    "mean_activation": 0.021,
                    "random_subset": 0.022,
                    "random-norm_matched": 0.023,
                    "random-covariance_matched": 0.024,
                    "principal_components": 0.025,
                },
                "price": -0.01,
            },
        ],
    },
    "selection": {
        "rules": [
            {"rule": "attribution", "share_of_effect": 0.9},
            {"rule": "firing_rate", "share_of_effect": 0.6},
            {"rule": "mean_activation", "share_of_effect": 0.7},
        ]
    },
}
EXPECTED = (
    [0.1] * 9
    + [0.095] * 9
    + [0.2] * 9
    + [0.07]
    + [0.06] * 9
    + [0.055] * 9
    + [0.16] * 9
    + [0.1] * 9
    + [0.25] * 9
    + [
        0.015,
        0.4,
        0.4,
        0.3,
        0.3,
        0.4,
        0.3,
        0.4,
        0.1,
        0.3,
        0.5,
        0.6,
        1.0,
        0.75,
        0.007,
        0.5,
        0.21,
        0.01,
        0.03,
        0.11,
        0.08,
        0.004,
        0.006,
        0.003,
        0.007,
        0.09,
        0.02,
        0.025,
        0.03,
        0.3,
        0.2,
        0.204,
        0.034,
        0.164,
        0.122,
        0.104,
        0.03,
        0.07,
        0.078,
        0.05,
    ]
    + [0.05, 0.03, 0.04, 0.01, 0.04, 0.02]
    + [0.058, 0.112, 0.052, 0.018, 0.1, 0.032, 0.038, 0.068, 0.032]
    + [0.03, 0.031, 0.032, 0.033, 0.034, 0.035, 0.015]
    + [0.02, 0.021, 0.022, 0.023, 0.024, 0.025, 0.01]
    + [0.3, 0.25, 0.3, 0.2, 0.3, 0.4]
    + [0.2, 0.3, 0.25, 0.4, 0.15, 0.1, 0.1, 0.1]
    + [0.1, 0.1, 0.05, 0.05, 0.08, 0.08, 0.02, 0.02, 0.03, 0.03, 0.04, 0.04]
)
