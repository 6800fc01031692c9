"""``kvferry plan`` takes transformers' defaults for the keys that a config file leaves out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.defaults import LEFT_OUT
from kvferry.cli.plan.model import Model, ModelError, read_model
from tests.cli.plan_command import write_config

SIZES = {"num_hidden_layers": 24, "num_attention_heads": 40, "hidden_size": 5120}


def both_files(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config file that leaves out defaults, and one with every key."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[name](**SIZES)
    brief = config.to_diff_dict() | SIZES | {"model_type": name}
    return brief, config.to_dict() | {"model_type": name}


def read(folder: Path, content: dict[str, Any]) -> Model | None:
    """Return a file's model without notes; ``None`` if it is refused."""
    try:
        return replace(read_model(Path(write_config(folder, content))), notes=())
    except ModelError:
        return None


@pytest.mark.filterwarnings("ignore")  # some classes complain about the sizes
@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_a_file_without_defaults_is_read_as_one_with_every_key(tmp_path: Path, name: str) -> None:
    brief, whole = both_files(name)
    if name != "granitemoehybrid":  # refused without this key
        brief.pop("layer_types", None)  # most published files are older than it
    assert read(tmp_path, brief) == read(tmp_path, whole)


NOT_SERVED = {"trocr", "xglm", "xlm"}
"""Models that vLLM does not know."""


@pytest.mark.filterwarnings("ignore")
def test_no_other_model_has_defaults_that_count(tmp_path: Path) -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    errors = pytest.importorskip("huggingface_hub.errors")
    wrong = set()
    for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_SERVED:
        try:
            brief, whole = both_files(name)
        except (errors.StrictDataclassError, NotImplementedError):
            continue  # these sizes do not fit the class
        brief.pop("layer_types", None)
        found = read(tmp_path, brief)
        if found is not None and found != read(tmp_path, whole):
            wrong.add(name)
    assert wrong == set()
