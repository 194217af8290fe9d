"""The constants of Eq. 3 that are measured at a pretrained policy's contexts, here a tiny one's."""

import pandas as pd
from support.policies import save_checkpoint

from analyses.measure import layer_constants


def test_gains_of_the_chosen_tokens_lie_between_the_products_of_their_contexts(tmp_path):
    policy = save_checkpoint(tmp_path / "policy", "llama")
    layer_constants.measure(tmp_path / "out", pretrained=str(policy), prompts=4, certified=2, estimated=1)
    tokens = pd.read_parquet(tmp_path / "out" / "tokens.parquet").dropna(subset="context").set_index("context")
    constants = pd.read_csv(tmp_path / "out" / "constants.csv")
    assert tokens.index.is_unique and len(tokens) == constants["context"].nunique() >= 2
    assert constants.groupby("context")["kind"].first().tolist()[:2] == ["certified"] * 2
    for row in constants.itertuples():
        gain = tokens.loc[row.context, f"act_grad_norm.{row.layer}"] / tokens.loc[row.context, "logit_grad_norm"]
        assert row.product_c * (1 - 1e-4) <= gain <= row.product_d * (1 + 1e-4)
        assert row.reach_min * (1 - 1e-4) <= gain <= row.reach_max * (1 + 1e-4)
