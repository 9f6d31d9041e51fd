"""Tune each head of one attention layer, and compare with one recipe for all heads.

    python examples/tuning.py [tokens]

For a whole model: `sparge tune --model DIR --l1 0.08 -o profile.json`.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import sparge
import sparge_tools.tuning
from sparge.synthetic import structured_qkv

tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
l1 = 0.05  # largest relative L1 error of a head on any calibration input

# Several inputs, so that the settings hold on more than one.
inputs = [structured_qkv(Hq=4, Hk=4, L=tokens, seed=seed) for seed in range(2)]
captures = [
    capture
    for qkv in inputs
    for capture in sparge_tools.tuning.captures_of(*qkv, {"is_causal": True})
]
profile = sparge_tools.tuning.tune({"layer": captures}, l1=l1)

with TemporaryDirectory() as folder:
    path = Path(folder) / "profile.json"
    profile.save(path)
    recipe = sparge.Profile.load(path).recipe_for("layer")
print("tuned:", recipe.keep, recipe.predictor)

query, key, value = structured_qkv(Hq=4, Hk=4, L=tokens, seed=9)  # not used for tuning
for name, used in (("default", sparge.Recipe()), ("tuned", recipe)):
    plan = sparge.make_plan(query, key, is_causal=True, recipe=used)
    out, _ = sparge.attend(query, key, value, plan, recipe=used)
    error = sparge.output_error(query, key, value, out, is_causal=True)
    print(f"{name}: density {plan.density:.3f}, largest error of a head {error.max():.4f}")
