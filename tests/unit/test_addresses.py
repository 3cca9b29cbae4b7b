"""Addresses as people may see them: what opens a server is left out wherever they are shown."""

import pytest

from exgrpo_megatron.addresses import secrets_in, without_credentials
from exgrpo_megatron.recipe import changed_keys, dump_recipe, parse_recipe, to_show


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://user:SECRET@host:5000/api", "http://host:5000/api"),
        ("https://SECRET@host", "https://host"),
        ("postgresql+psycopg2://user:SEC/R?E#T@host/db", "postgresql+psycopg2://host/db"),
        ("postgresql://host/db?user=me&password=SECRET", "postgresql://host/db?***"),
        # Nothing to hide: a port, and an @ in a path.
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("sqlite:////data/a@b:c/mlflow.db", "sqlite:////data/a@b:c/mlflow.db"),
        ("databricks://profile", "databricks://profile"),
        ("GET to http://u:SECRET@h/x?t=SECRET failed, see https://e.org", "GET to http://h/x?*** failed, see https://e.org"),
    ],
)  # fmt: skip
def test_an_address_is_shown_without_user_password_and_query(address, shown):
    assert without_credentials(address) == shown


def test_a_password_is_found_by_itself_as_written_and_decoded():
    secrets = secrets_in("postgresql://me:p%40ss@host/db?sslpassword=t%2Fken")
    assert set(secrets) == {"p%40ss", "p@ss", "t%2Fken", "t/ken"}
    assert without_credentials("no entry with p@ss or t%2Fken", secrets) == "no entry with *** or ***"


def recipe_with(address):
    recipe = {"policy": {"model_name": "embedded:chain-qwen2"}, "data": {"train": {"path": "questions.jsonl"}}}
    return parse_recipe({**recipe, "logger": {"mlflow": {"tracking_uri": address}}})


def test_a_shown_recipe_and_its_changes_have_no_password():
    config, old, clean = map(recipe_with, ["http://me:SECRET@host", "http://u:SECRET@old", "http://host"])
    assert "SECRET" in dump_recipe(config), "a run needs it"
    assert to_show(config) == clean
    assert changed_keys(old.model_dump(), config.model_dump()) == [
        "logger.mlflow.tracking_uri: http://old -> http://host"
    ]
