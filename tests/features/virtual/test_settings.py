"""``virtual_models`` in a config: values, and errors with their lines."""

from __future__ import annotations

from textwrap import dedent

import jsonschema
import pytest

from llamasup.core.config.config_keys import json_schema
from llamasup.features import config_keys
from llamasup.features.virtual.settings import VIRTUAL_MODELS, VirtualEntry
from tests.core.config.reading import config_of, issue_of, issues_of

MODELS = "models: {qwen: {path: q.gguf, aliases: [gpt]}, phi: {path: p.gguf}}\n"


def test_parameters_are_read_as_in_json() -> None:
    config = config_of(
        MODELS
        + """\
virtual_models:
  qwen:high:
    model: qwen
    set:
      temperature: 0.2
      chat_template_kwargs: {enable_thinking: true, style: 'true', steps: [1, two, ~]}
    default: {stop: "${STOP}", max_tokens: 512}
    remove: [top_k]
    system: "Be ${HOW:-brief}."
  any: {any: [qwen:high, phi]}
""",
        STOP="END",
    )
    assert config.of(VIRTUAL_MODELS) == {
        "qwen:high": VirtualEntry(
            model="qwen",
            set={
                "temperature": 0.2,
                "chat_template_kwargs": {"enable_thinking": True, "style": "true", "steps": [1, "two", None]},
            },
            default={"stop": "END", "max_tokens": 512},
            remove=("top_k",),
            system="Be brief.",
        ),
        "any": VirtualEntry(any=("qwen:high", "phi")),
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{}", "v: model is missing; add the model that it stands for, or a list of models as any"),
        ("{any: []}", "v: model is missing; add the model that it stands for, or a list of models as any"),
        ("{model: qwen, any: [phi]}", "v: model and any exclude each other; keep one of them"),
        ("{model: nope}", "v.model: unknown model 'nope'; add it to models, or correct the name"),
        ("{any: [qwen, nope]}", "v.any[1]: unknown model 'nope'; add it to models, or correct the name"),
        ("{any: [phi, phi]}", "v.any[1]: no request takes 'phi', because a name before it stands for"),
        ("{any: [phi, PHI]}", "v.any[1]: no request takes 'PHI', because a name before it stands for"),
        ("{any: [gpt, qwen]}", "v.any[1]: no request takes 'qwen', because a name before it stands for"),
        ("{any: ['a b']}", "v.any[0]: invalid value 'a b': it contains ' '"),
        ("{model: v}", "v: the virtual models go round in a circle (v → v); one has to name a model"),
        ("{model: qwen, set: {temprature: 1}}", "v.set.temprature: invalid parameter: llama-server would ig"),
        ("{model: qwen, set: {'a b': 1}}", "v.set.a b: invalid parameter: expected the name of"),
        (
            "{model: qwen, set: {temperature: .nan}}",
            "v.set.temperature: invalid value '.nan'; expected a num",
        ),
        ("{model: qwen, set: {temperature: 1e999}}", "v.set.temperature: invalid value '1e999'; the number"),
        ("{model: qwen, set: {n: 2}}", "v.set.n: invalid parameter: a virtual model cannot change it"),
        ("{model: qwen, set: {grammar: '${UNSET}'}}", "v.set.grammar: the environment variable UNSET is not"),
        ("{model: qwen, set: [a]}", "v.set: found a list; expected parameters, such as temperature: 0.6"),
        ("{model: qwen, remove: [model]}", "v.remove[0]: invalid value 'model': a virtual model cannot"),
        (
            "{model: qwen, set: {seed: 1}, default: {seed: 2}}",
            "v.default.seed: has no effect, because set also",
        ),
        ("{model: qwen, set: {seed: 1}, remove: [seed]}", "v.remove[0]: 'seed' is also in set; use set to"),
        (
            "{model: qwen, default: {seed: 1}, remove: seed}",
            "v.remove: 'seed' is also in default; use set to",
        ),
        (
            "{model: qwen, set: {max_tokens: 1, n_predict: 2}}",
            "v.set.n_predict: is the same parameter as set.max_tokens; remove one of them",
        ),
        (
            "{model: qwen, set: {max_tokens: 1}, default: {max_output_tokens: 2}}",
            "v.default.max_output_tokens: is the same parameter as set.max_tokens; remove one of them",
        ),
        (
            "{model: qwen, default: {max_tokens: 1}, remove: [n_predict]}",
            "v.remove[0]: 'n_predict' is also in default; use set to replace what the client sends",
        ),
        ("{model: qwen, remove: [seed, seed]}", "v.remove[1]: 'seed' occurs twice; remove it"),
        (
            "{model: qwen, remove: [max_tokens, n_predict]}",
            "v.remove[1]: 'n_predict' is the same as 'max_tokens'; remove it",
        ),
        ("{model: qwen, system: ''}", "v.system: invalid value ''; expected text"),
        ("{model: qwen, system: [a]}", "v.system: found a list; expected text"),
        ("{model: qwen, temperature: 1}", "v.temperature: unknown key; valid keys: model, any, set"),
    ],
)
def test_mistake_is_reported_with_its_line(entry: str, message: str) -> None:
    found = issue_of(f"{MODELS}virtual_models:\n  v: {entry}\n")
    line, rest = (3, f"virtual_models.{message}")
    assert found.startswith(f"c.yaml:{line}: {rest}"), found


def test_name_of_a_model_is_no_name_of_a_virtual_one() -> None:
    for name in ("qwen", "gpt"):
        (found,) = issues_of(f"{MODELS}virtual_models:\n  {name}: {{model: phi}}\n")
        assert found == (
            f"c.yaml:3: virtual_models.{name}: is also the name or an alias of a model; choose another name"
        )


def test_other_spelling_of_a_name_is_the_same_name() -> None:
    assert issues_of(
        MODELS + "virtual_models: {QWEN: {model: phi}, v: {model: phi}, V: {model: qwen}}\n"
    ) == [
        "c.yaml:2: virtual_models.QWEN: is also the name or an alias of a model; choose another name",
        "c.yaml:2: virtual_models.V: is another spelling of 'v'; choose another name",
    ]


def test_circle_of_two_names_its_way() -> None:
    found = issue_of(f"{MODELS}virtual_models:\n  a: {{model: b}}\n  b: {{model: a}}\n")
    assert found.startswith("c.yaml:4: virtual_models.b: the virtual models go round in a circle (a → b → a)")


@pytest.mark.parametrize("name", ["v", "V", "v:latest"])
def test_default_model_is_not_a_virtual_one(name: str) -> None:
    for models in (MODELS, "models_dir: m\n"):
        found = issue_of(f"{models}default_model: {name}\nvirtual_models: {{v: {{model: phi}}}}\n")
        assert found == "c.yaml:2: default_model: 'v' is a virtual model; name a model"


def test_names_of_models_may_be_written_in_any_spelling() -> None:
    virtual = "virtual_models: {v: {any: [PHI, GPT]}, w: {model: V}, x: {model: Gpt}}\n"
    assert config_of(f"{MODELS}default_model: QWEN\n{virtual}").default_model == "QWEN"


def test_member_without_a_model_of_its_own_is_reported() -> None:
    virtual = "virtual_models: {v: {any: [phi, Cold, both]}, cold: {model: PHI}, both: {any: [phi, qwen]}}\n"
    assert issues_of(MODELS + virtual) == [
        "c.yaml:2: virtual_models.v.any[1]: no request takes 'Cold', because a name before it stands for "
        "the same model; remove one of them"
    ]


def test_names_may_be_unknown_where_a_folder_has_more_models() -> None:
    text = "models_dir: m\nvirtual_models: {v: {any: [found, other]}}\n"
    assert config_of(text).of(VIRTUAL_MODELS)["v"].any == ("found", "other")


def test_schema_accepts_what_the_reader_accepts() -> None:
    schema = json_schema(config_keys())
    entry = {"model": "qwen", "set": {"temperature": 0.2, "chat_template_kwargs": {"a": [1]}}}
    jsonschema.validate({"virtual_models": {"qwen:high": entry}}, schema)
    for invalid in ({"set": {"model": "x"}}, {"set": {"a b": 1}}, {"set": 3}, {"remove": ["n"]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"virtual_models": {"v": invalid}}, schema)


def test_text_of_a_block_is_a_system_prompt() -> None:
    text = dedent("""\
        virtual_models:
          v:
            model: qwen
            system: |
              You are terse.
              You never apologize.
        """)
    assert config_of(MODELS + text).of(VIRTUAL_MODELS)["v"].system == "You are terse.\nYou never apologize.\n"
