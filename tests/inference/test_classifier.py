"""Classifiers and cross-encoders: the same logits as transformers gives, in any layout and whatever is beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import Batcher, Classifier, Engine
from batchwright.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel

from .classifiers import own_logits, save_classifier

LABELS = ["bad", "fair", "good"]
TEXTS = ["a", "The sky is blue.", "Grün, 天空, 🌈!", "rain and " * 20, "A fine day."]
PAIRS = [("Which river?", text) for text in TEXTS] + [(text, "a") for text in TEXTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    made: dict[str, tuple[str, list[str], dict[str, Any]]] = {
        "bert": ("bert", LABELS, {}),
        "bert-pair": ("bert", ["score"], {}),
        "roberta": ("roberta", LABELS, {"type_vocab_size": 1, "problem_type": "multi_label_classification"}),
        "xlm-roberta-pair": ("xlm-roberta", ["score"], {"type_vocab_size": 1}),
        "electra": ("electra", LABELS, {"embedding_size": 64}),
        "raw-pair": ("bert", ["score"], {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
    }
    return {
        name: save_classifier(folder / name, minilm_path, kind, labels, **config)
        for name, (kind, labels, config) in made.items()
    }


@pytest.mark.parametrize("name", ["bert", "bert-pair", "roberta", "xlm-roberta-pair", "electra"])
def test_logits_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    classifier = Classifier(folders[name])
    inputs: list[str | tuple[str, str]] = [*TEXTS, *PAIRS]
    expected = own_logits(folders[name], inputs)
    np.testing.assert_allclose(classifier.logits(inputs), expected, atol=1e-5)
    for layout in ("padded", "bucketed"):
        np.testing.assert_allclose(Classifier(folders[name], layout=layout).logits(inputs), expected, atol=1e-5)
    assert classifier.layout == ("bucketed" if name == "electra" else "packed")
    assert classifier.stats.texts == len(inputs)
    types_matter = np.abs(own_logits(folders[name], [("a b", "c")]) - own_logits(folders[name], ["a b c"]))
    assert types_matter.max() > 1e-3, "the test would not notice pairs that are read as one text"


def test_probabilities_and_scores_are_what_the_config_says(folders: dict[str, Path]) -> None:
    def logits(name: str, inputs: Any) -> torch.Tensor:
        return torch.from_numpy(own_logits(folders[name], inputs))

    classify = {name: Classifier(folder).classify(TEXTS) for name, folder in folders.items() if name != "electra"}
    np.testing.assert_allclose(classify["bert"], logits("bert", TEXTS).softmax(1), atol=1e-5)
    np.testing.assert_allclose(classify["roberta"], logits("roberta", TEXTS).sigmoid(), atol=1e-5)
    np.testing.assert_allclose(classify["bert-pair"], logits("bert-pair", TEXTS).sigmoid(), atol=1e-5)
    scores = {name: Classifier(folders[name]).score(PAIRS) for name in ("bert-pair", "raw-pair")}
    np.testing.assert_allclose(scores["bert-pair"], logits("bert-pair", PAIRS).sigmoid()[:, 0], atol=1e-5)
    np.testing.assert_allclose(scores["raw-pair"], logits("raw-pair", PAIRS)[:, 0], atol=1e-5)
    ranked = Classifier(folders["raw-pair"]).rank("Which river?", TEXTS, top_n=3)
    order = np.argsort(-logits("raw-pair", PAIRS[: len(TEXTS)])[:, 0].numpy(), kind="stable")
    assert [each.index for each in ranked] == order[:3].tolist()
    assert ranked[0].score == pytest.approx(float(scores["raw-pair"][order[0]]), abs=1e-5)


@pytest.mark.parametrize("count", [7, 23, 66])
def test_equal_documents_have_equal_scores_and_keep_their_order(folders: dict[str, Path], count: int) -> None:
    """Whatever row, and place in it, each would be computed in."""
    documents = ["Bread." if at % 3 else f"A river, the {at}th." for at in range(count)]
    ranked = Classifier(folders["raw-pair"]).rank("Which river?", documents)
    bread = [each for each in ranked if documents[each.index] == "Bread."]
    assert [each.index for each in bread] == [at for at in range(count) if at % 3]
    assert len({each.score for each in bread}) == 1
    assert sorted(each.index for each in ranked) == list(range(count))


async def ask_all(classifier: Classifier) -> list[Any]:
    import asyncio

    async with Batcher(classifier) as batcher:
        return await asyncio.gather(*(batcher.compute(each) for each in [*TEXTS, *PAIRS]))


def test_a_batcher_computes_with_it(folders: dict[str, Path]) -> None:
    import asyncio

    classifier = Classifier(folders["bert"])
    np.testing.assert_allclose(asyncio.run(ask_all(classifier)), classifier.logits([*TEXTS, *PAIRS]), atol=1e-5)


def test_what_is_too_long_is_refused_or_cut(folders: dict[str, Path]) -> None:
    classifier = Classifier(folders["bert-pair"])
    assert classifier.max_length == 64
    long = "rain " * 70
    with pytest.raises(ContextLengthExceeded, match=r"inputs\[1\]: prompt of 76 tokens"):
        classifier.score([("a", "b"), ("a b c", long)])
    cutting = Classifier(folders["bert-pair"], truncate=True)
    np.testing.assert_allclose(cutting.score([("a b c", long)]), classifier.score([("a b c", "rain " * 58)]), atol=1e-6)
    assert cutting.stats.truncated == 1


@pytest.mark.parametrize("wrong", ["\ud800", ("a", 5), ("a", "b", "c"), [], None, [10**6]])
def test_inputs_that_cannot_be_computed(folders: dict[str, Path], wrong: Any) -> None:
    classifier = Classifier(folders["bert"])
    with pytest.raises(InvalidRequest, match=r"inputs\[0\]"):
        classifier.logits([wrong])
    good, bad = classifier.generate_batch(["a", wrong])
    assert isinstance(bad, InvalidRequest)
    assert isinstance(good, np.ndarray)
    np.testing.assert_allclose(good, classifier.logits(["a"])[0], atol=1e-6)


def test_models_that_are_no_classifiers(folders: dict[str, Path], minilm_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no head for sequence classification"):
        Classifier(minilm_path)
    with pytest.raises(UnsupportedModel, match="--classifier"):
        Engine(folders["bert"])
    with pytest.raises(ValueError, match="has 3 labels"):
        Classifier(folders["bert"]).score(PAIRS)
    with pytest.raises(UnsupportedModel, match="layout='bucketed'"):
        Classifier(folders["electra"], layout="packed")
    odd = save_classifier(
        tmp_path / "odd", minilm_path, "bert", ["score"], sbert_ce_default_activation_function="torch.nn.Tanh"
    )
    with pytest.raises(UnsupportedModel, match=r"torch\.nn\.Tanh"):
        Classifier(odd)
