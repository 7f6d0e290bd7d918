"""The paper's claims and ours, each with the statistic that it is judged by."""

from dmsae.experiments.claims.consistency import CONSISTENCY
from dmsae.experiments.claims.prices import PRICES
from dmsae.experiments.claims.scores import SCORES
from dmsae.experiments.claims.use import USE

CLAIMS = (*SCORES, *USE, *PRICES, *CONSISTENCY)
