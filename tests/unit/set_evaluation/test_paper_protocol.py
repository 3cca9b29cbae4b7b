"""The paper's protocol as a part of a recipe: avg@32 for AIME and AMC, else one answer, T = 0.6 (arXiv:2510.02245)."""

from pathlib import Path

from exgrpo_megatron.recipe import load_recipe

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def test_the_protocol_goes_above_the_recipe_of_a_model(tmp_path):
    parts = [RECIPES / "qwen2.5_math_7b_8gpu.yaml", RECIPES / "evaluation" / "paper_protocol.yaml"]
    (tmp_path / "mine.yaml").write_text(f"defaults: [{', '.join(map(str, parts))}]\n")
    evaluation = load_recipe(tmp_path / "mine.yaml").eval
    assert {name: chosen.num_samples for name, chosen in evaluation.sets.items() if chosen.num_samples > 1} == {
        "aime24": 32,
        "aime25": 32,
        "amc": 32,
    }
    assert {evaluation.temperature_of(name) for name in evaluation.sets} == {0.6}
    out_of_distribution = {name for name, chosen in evaluation.sets.items() if chosen.group == "OOD"}
    assert out_of_distribution == {name for name, chosen in evaluation.sets.items() if chosen.choices_key}
    assert evaluation.sets["aime24"].pass_ks == (2, 4, 8, 16, 32)
