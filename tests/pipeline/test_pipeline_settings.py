"""The configuration: presets and overrides, its schema, and the files that must say the same as the code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from hvpflow.errors import HvpflowError
from hvpflow.pipeline.plan import make_plan, settings_digest
from hvpflow.pipeline.preparation import recipe_digest
from hvpflow.pipeline.schema import config_schema, markdown_tables
from hvpflow.pipeline.settings import config_from_mapping, load_config, set_dotted

ROOT = Path(__file__).resolve().parents[2]


def test_shipped_schema_and_tables_are_those_of_the_code():
    shipped = (ROOT / "workflow" / "schemas" / "config.schema.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(shipped) == config_schema(), "run python -m hvpflow.pipeline.schema"
    assert markdown_tables().strip() in (ROOT / "config" / "README.md").read_text(encoding="utf-8")


def test_every_key_is_described():
    def undescribed(schema, name):
        for key, inner in schema.get("properties", {}).items():
            if "properties" not in inner and "description" not in inner and not name.startswith(".properties"):
                yield f"{name}.{key}"
            for option in [inner, *inner.get("anyOf", []), *inner.get("oneOf", [])]:
                yield from undescribed(option, f"{name}.{key}")

    nested = {".corpus", ".analysis", ".decentralized", ".lr_schedule", ".decentralized.adaptive_consensus"}
    assert [name for name in undescribed(config_schema(), "") if name not in nested] == []


@pytest.mark.parametrize("path", sorted((ROOT / "config").rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    mapping = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.validate(mapping, config_schema())
    config = load_config(path)
    assert config.owned
    make_plan(config)
    jsonschema.validate(config.to_mapping(), config_schema())


def test_written_configuration_reads_back_equal(mapping):
    config = config_from_mapping(mapping())
    again = config_from_mapping(yaml.safe_load(yaml.safe_dump(config.to_mapping())))
    assert again.to_mapping() == config.to_mapping()
    assert settings_digest(again) == settings_digest(config)
    assert recipe_digest(again.training_recipe) == recipe_digest(config.training_recipe)


def test_a_preset_takes_overrides_and_keeps_the_rest():
    config = config_from_mapping({"recipe": "20m", "optimizer": {"lr": 0.5}, "training": {"checkpoint_epochs": [3]}})
    recipe = config.training_recipe
    assert recipe.optimizer.lr == 0.5
    assert recipe.training.checkpoint_epochs == (3,)
    assert recipe.num_parameters == 20_403_520
    assert config.run_directory == Path(recipe.runtime.output_dir)


def test_digest_follows_what_changes_numbers_and_nothing_else():
    def digest(**analysis):
        return settings_digest(config_from_mapping({"run": "run", "analysis": analysis}))

    assert digest(seed=1) != digest() != digest(noise_samples=3)
    assert digest(dtype="float64") != digest() != digest(shards=2)
    assert digest(device="cpu", cpu_threads=1, plots=False, checkpoints=["final.pt"], cache_dir="x") == digest()


def test_dotted_override_makes_the_sections_it_needs():
    mapping = {"output": "x"}
    set_dotted(mapping, "training.checkpoint_epochs=[1, 2]")
    set_dotted(mapping, "analysis.amp=true")
    assert mapping == {"output": "x", "training": {"checkpoint_epochs": [1, 2]}, "analysis": {"amp": True}}


def test_run_directory_is_given_once():
    config = config_from_mapping({"recipe": "demo", "run": "mine"})
    assert config.training_recipe.runtime.output_dir == "mine"
    with pytest.raises(HvpflowError, match="give the run directory once"):
        config_from_mapping({"recipe": "demo", "run": "mine", "runtime": {"output_dir": "other"}})


def test_text_and_its_name_must_agree():
    for mapping in (
        {"recipe": "20m", "corpus": {"source": "python-stdlib"}},
        {"recipe": "demo", "data": {"dataset": "x"}},
    ):
        with pytest.raises(HvpflowError, match=r"corpus\.source"):
            make_plan(config_from_mapping(mapping)).preparation_digest  # noqa: B018


def test_a_cache_that_is_not_the_one_trained_on_is_mentioned(workplace):
    path = workplace.directory / "run" / "environment.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    mapping = {"run": str(workplace.directory / "run"), "analysis": {"cache_dir": str(workplace.directory / "cache")}}
    assert make_plan(config_from_mapping(mapping)).notes == ()
    record["loader"]["cache_identity"] = "0" * 64
    path.write_text(json.dumps(record), encoding="utf-8")
    (note,) = make_plan(config_from_mapping(mapping)).notes
    assert "was trained on the token cache 000000000000" in note


def test_nothing_to_work_on_is_refused():
    with pytest.raises(HvpflowError, match=r"give run .* or recipe"):
        config_from_mapping({"output": "x"})


def test_planning_needs_neither_torch_nor_pandas():
    code = "import sys, hvpflow.pipeline.plan, hvpflow.pipeline.output; print(*sorted(sys.modules), sep='\\n')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "pandas", "pyarrow", "tokenizers", "matplotlib"} & set(shown.stdout.split()) == set()


def test_conda_environment_names_the_same_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    names = [entry for entry in environment["dependencies"] if isinstance(entry, str) and entry != "pip"]
    expected = [f"python{project['requires-python']}", *project["dependencies"]]
    assert sorted(names) == sorted(re.sub(r"^torch(?=\W)", "pytorch", entry) for entry in expected)
