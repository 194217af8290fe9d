"""Tables 2 to 4: the paper's values beside those of the presets, of the runs, and of the reward."""

import pytest

from analyses.common.places import place
from analyses.paper import tables2_4
from analyses.paper.tables2_4 import Options, main, table2, table3, table4
from gradscope.trainer import get_preset


def test_every_setting_of_table_2_is_the_presets_and_equals_the_papers():
    table = table2().set_index("setting here")
    for setting, row in table.iterrows():
        for kind, names in (("K&K", tables2_4.PUZZLES), ("math", tables2_4.MATH)):
            assert [getattr(get_preset(name), setting) for name in names] == [row[f"{kind}: here"]] * 2
            assert row[f"{kind}: equal"] is True
    assert table.loc["questions_per_step", ["K&K: paper", "math: paper"]].tolist() == [64, 128]
    assert table.loc["mini_batch_size", ["K&K: paper", "math: paper"]].tolist() == [256, 512]


def test_table_3_is_of_the_runs_and_says_nothing_where_the_paper_or_the_scale_does_not():
    table = table3().set_index(["variant", "setting here"])
    assert table.loc[("reweight", "reweight_alpha"), ["K&K: here", "math: here"]].tolist() == [0.3, 0.1]
    assert table.loc[("lopti", "lopti_eta"), ["K&K: here", "math: here"]].tolist() == [0.5, 0.5]
    assert table.loc[("rpp-reweight", "reweight_alpha"), "K&K: here"] == 0.1
    known = [value for kind in ("K&K", "math") for value in table[f"{kind}: equal"] if value is not None]
    assert known == [True] * len(known) == [True] * 8


def test_the_reward_is_the_released_codes_reading_of_table_4_and_differs_from_the_texts_in_three_rows():
    table = table4().set_index(["format", "answer"])
    assert table["here"].tolist() == table["the released code"].tolist() == [3, -0.5, -0.5, -1, -3, -3, -3, -3]
    differs = table.index[table["here"] != table["the paper's text"]].tolist()
    assert differs == [("good", "nobody right"), ("bad", "all people right"), ("bad", "some people right")]
    # The text's own sums: 1 or −1 for the format, 2, −1.5 or −2 for the answer.
    assert table["the paper's text"].tolist() == [1 + 2, 1 - 1.5, 1 - 2, 1 - 2, -1 + 2, -1 - 1.5, -1 - 2, -1 - 2]


@pytest.mark.parametrize("name", ["table2", "table3", "table4"])
def test_the_tables_are_written_alike_each_time_and_as_the_repository_has_them(name, tmp_path, repository, capsys):
    for folder in ("one", "two"):
        main(Options(out=tmp_path / folder))
    for file in (f"{name}.csv", f"{name}.md"):
        one = place(tmp_path / "one", file).read_bytes()
        assert one == place(tmp_path / "two", file).read_bytes()
        assert one == place(repository / "figures", file).read_bytes()
    assert name in capsys.readouterr().out
