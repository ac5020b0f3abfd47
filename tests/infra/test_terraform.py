"""infra/terraform, as far as a machine without Azure, Databricks and Terraform can check it.

`terraform_check` compares every block with the providers' own schema. Here it is shown that it
finds nothing in our files, and that it finds what somebody breaks in them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.infra import misspelling, terraform_files
from tests.infra.provider_bindings import SCHEMA, dumps, extracted
from tests.infra.terraform_check import Finding, check
from tests.infra.terraform_files import Block, Body, Files, parse

ROOT = Path(__file__).parents[2] / "infra" / "terraform"
TREE = Files.read(ROOT)
KNOWN: dict[str, Any] = json.loads(SCHEMA.read_text("utf-8"))
STAGES = ("sit", "uat", "prod")
LAYOUT = ("terraform.tf", "variables.tf", "outputs.tf", "main.tf", "locals.tf")
# Where data lives: an apply must not take it away.
DATA = {
    "azapi_resource",  # the tables of the records
    "azurerm_databricks_workspace",  # MLflow's runs
    "azurerm_log_analytics_workspace",
    "azurerm_resource_group",
    "azurerm_storage_account",
    "azurerm_storage_container",
    "databricks_catalog",
}
SECRETS = re.compile(
    r"password|secret$|secret_value|_secret|access_key|shared_key|account_key|connection_string"
    r"|sas_token|(^|_)token$|private_key|ssh_public_keys"
)


def blocks(body: Body) -> Iterator[Block]:
    for block in body.blocks:
        yield block
        yield from blocks(block.body)


def having(name: str, old: str, new: str) -> Files:
    """The tree with `old` replaced once in a file, where it stands exactly once."""
    text = TREE.texts[name]
    assert text.count(old) == 1, (name, old, text.count(old))
    return TREE.having(name, text.replace(old, new))


def test_every_file_is_read_and_sound() -> None:
    assert [str(found) for found in check(TREE, KNOWN)] == []
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.tf")}
    assert {name for name in there if ".terraform/" not in name} == set(TREE.texts)
    assert len(there) > 70


def test_every_resource_type_is_known_in_the_version_that_is_required() -> None:
    used = terraform_files.used_types(TREE)
    assert len(used["resource"]) > 40
    for kind in ("resource", "data"):
        # Neither more nor less: what is no longer used leaves the extract.
        assert set(KNOWN[kind]) == used[kind]
    assert len(SCHEMA.read_bytes()) < 200_000


@pytest.mark.cloud
def test_the_extract_is_what_the_packages_hold() -> None:
    """62 MB from the package index, once."""
    assert SCHEMA.read_text("utf-8") == dumps(extracted(TREE))


def test_the_format_is_terraforms() -> None:
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("terraform is not on the PATH")
    done = subprocess.run(
        [terraform, "fmt", "-check", "-recursive", "-diff", str(ROOT)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def misspell(seed: int, many: int) -> list[tuple[misspelling.Word, str, list[Finding]]]:
    """`many` words of each kind, each misspelt alone: (word, as written, findings that name it)."""
    words = misspelling.words(TREE)
    known = {word.text for word in words}
    chance = random.Random(seed)
    out = []
    for kind in ("block", "argument", "reference"):
        for word in chance.sample([word for word in words if word.kind == kind], many):
            made = misspelling.misspelt(word.text, chance, known)
            found = check(misspelling.with_misspelling(TREE, word, made), KNOWN)
            out.append((word, made, [one for one in found if made in one.message]))
    return out


def test_thirty_misspellings_are_found_and_named() -> None:
    """`pytest -s` lists them."""
    tried = misspell(18, 10)
    for word, made, found in tried:
        print(f"{word.kind:9} {word.text} -> {made}: {found[0] if found else 'NOT FOUND'}")
    assert len(tried) == 30
    assert [(word, made) for word, made, found in tried if not found] == []
    # The finding stands in the file that was broken. An alias of a provider is missed where it is
    # used: only there can be seen that another name was meant.
    away = [word for word, _, found in tried if word.file not in {one.file for one in found}]
    assert all(word.kind == "reference" and word.file.endswith("/terraform.tf") for word in away)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_three_hundred_misspellings_are_found(seed: int) -> None:
    tried = misspell(seed, 100)
    assert [(word, made) for word, made, found in tried if not found] == []


STORAGE, NETWORK = "modules/storage/main.tf", "modules/network/main.tf"
WORKSPACE, STAGE = "modules/workspace/main.tf", "modules/stage/main.tf"
MONITORING, CATALOG = "modules/monitoring/main.tf", "modules/catalog/main.tf"
BOOTSTRAP, CLUSTER = "bootstrap/main.tf", "modules/cluster/main.tf"
# What somebody might break, and what must be said: (file, text in it, text instead, message).
LIES = {
    "an attribute of another resource": (
        STORAGE,
        "azurerm_storage_account.this.id\n\n  rule",
        "azurerm_storage_account.this.vnet_id\n\n  rule",
        "azurerm_storage_account has no vnet_id",
    ),
    "the name where the id belongs": (
        NETWORK,
        "private_dns_zone_id  = each.value.id",
        "private_dns_zone_id  = each.value.name",
        "private_dns_zone_id gets each.value.name, no id",
    ),
    "the id of another resource": (
        NETWORK,
        "  nat_gateway_id       = azurerm_nat_gateway.this.id",
        "  nat_gateway_id       = azurerm_public_ip.nat.id",
        "nat_gateway_id gets azurerm_public_ip.nat.id, of a azurerm_public_ip",
    ),
    "an attribute that only another type has": (
        NETWORK,
        "virtual_network_id   = azurerm_virtual_network.this.id",
        "virtual_network_id   = azurerm_virtual_network.this.immutable_id",
        "azurerm_virtual_network has no immutable_id",
    ),
    "a resource that is not there": (
        NETWORK,
        "public_ip_address_id = azurerm_public_ip.nat.id",
        "public_ip_address_id = azurerm_public_ip.nta.id",
        "azurerm_public_ip has no nta",
    ),
    "an output that the module lacks": (
        STAGE,
        "module.network.endpoint_subnet_id",
        "module.network.endpoints_subnet_id",
        "module network has no endpoints_subnet_id",
    ),
    "a module that is not there": (
        STAGE,
        "module.network.private_dns_zone_ids",
        "module.networks.private_dns_zone_ids",
        "has no networks",
    ),
    "a variable that the module lacks": (
        STAGE,
        "endpoint_subnet_id   = module",
        "endpoint_subnets_id  = module",
        "module storage has no variable endpoint_subnets_id",
    ),
    "a variable that the module needs": (
        STAGE,
        "  endpoint_subnet_id   = module.network.endpoint_subnet_id\n",
        "",
        "module storage needs the variable endpoint_subnet_id",
    ),
    "a required argument left out": (
        NETWORK,
        '  allocation_method   = "Static"\n',
        "",
        "azurerm_public_ip.nat needs allocation_method",
    ),
    "a required block left out": (
        MONITORING,
        '  time_period {\n    start_date = "${var.budget_start}T00:00:00Z"\n  }\n',
        "",
        "azurerm_consumption_budget_subscription.this needs time_period",
    ),
    "a required argument of a nested block left out": (
        NETWORK,
        '      name = "Microsoft.Databricks/workspaces"\n',
        "",
        "azurerm_subnet.cluster.delegation.service_delegation needs name",
    ),
    "a block written as an argument": (
        STORAGE,
        "    container_delete_retention_policy {\n",
        "    container_delete_retention_policy = {\n",
        "container_delete_retention_policy is a block",
    ),
    "an argument written as a block": (
        CLUSTER,
        'custom_tags = {\n    project = "raypipe"',
        'custom_tags {\n    project = "raypipe"',
        "takes as an argument, with =, custom_tags",
    ),
    "a block twice that may stand once": (
        STORAGE,
        "  sas_policy {\n",
        '  network_rules {\n    default_action = "Allow"\n  }\n\n  sas_policy {\n',
        "takes one block network_rules",
    ),
    "what only the provider sets": (
        NETWORK,
        'allocation_method   = "Static"',
        'allocation_method   = "Static"\n  ip_address = "192.0.2.1"',
        "ip_address is set by the provider only",
    ),
    "an id given": (
        NETWORK,
        'allocation_method   = "Static"',
        'allocation_method   = "Static"\n  id = "x"',
        "takes no argument id",
    ),
    "an argument inside a dynamic block": (
        MONITORING,
        "          name = column.value.name\n",
        "          nane = column.value.name\n",
        "this.stream_declaration.column takes no argument nane",
    ),
    "a dynamic block of a name that is not there": (
        CATALOG,
        '  external_location = each.value.name\n\n  dynamic "grant"',
        '  external_location = each.value.name\n\n  dynamic "grants"',
        "takes no block grants",
    ),
    "the iterator of another block": (
        MONITORING,
        "          type = column.value.type\n",
        "          type = columns.value.type\n",
        "nothing here is called columns",
    ),
    "a field that the data file lacks": (
        MONITORING,
        "          type = column.value.type\n",
        "          type = column.value.kind\n",
        "has no kind: column.value.kind",
    ),
    "each without for_each": (
        NETWORK,
        'name                = "pip-${var.name}-nat"',
        'name                = "pip-${each.key}-nat"',
        "each means nothing here",
    ),
    "count without count": (
        NETWORK,
        'name                = "pip-${var.name}-nat"',
        'name                = "pip-${count.index}-nat"',
        "count means nothing here",
    ),
    "count and for_each": (
        NETWORK,
        "  for_each = local.cluster_subnets\n",
        "  for_each = local.cluster_subnets\n  count    = 2\n",
        "count and for_each exclude each other",
    ),
    "a resource with for_each used as one": (
        STORAGE,
        'azurerm_storage_container.this["logs"].name',
        "azurerm_storage_container.this[0].nname",
        "azurerm_storage_container has no nname",
    ),
    "a resource with count used as one": (
        WORKSPACE,
        "  network_connectivity_config_id = databricks_mws_network_connectivity_config.this[0]"
        ".network_connectivity_config_id\n  resource_id",
        "  network_connectivity_config_id = databricks_mws_network_connectivity_config.this"
        ".network_connectivity_config_id\n  resource_id",
        "is a list and has no network_connectivity_config_id",
    ),
    "a list where one is needed": (
        WORKSPACE,
        "  principal_id         = azurerm_databricks_access_connector.storage.identity[0]"
        '.principal_id\n  principal_type       = "ServicePrincipal"\n}\n\n# Unity',
        "  principal_id         = azurerm_databricks_access_connector.storage.identity[*]"
        '.principal_id\n  principal_type       = "ServicePrincipal"\n}\n\n# Unity',
        "principal_id: a string is needed",
    ),
    "one where a list is needed": (
        NETWORK,
        "address_space       = [var.address_space]",
        "address_space       = var.address_space",
        "address_space: a list is needed",
    ),
    "a word for a number": (
        CLUSTER,
        "timeout_seconds     = 3600",
        'timeout_seconds     = "an hour"',
        "timeout_seconds: a number is needed",
    ),
    "a word for a bool": (
        STORAGE,
        "is_hns_enabled                    = true",
        'is_hns_enabled                    = "yes"',
        "is_hns_enabled: true or false is needed",
    ),
    "a reference inside a heredoc": (
        BOOTSTRAP,
        "ForAnyOfAnyValues:GuidEquals {${local.delegable}}\n        AND",
        "ForAnyOfAnyValues:GuidEquals {${local.delegatable}}\n        AND",
        "has no delegatable",
    ),
    "a function": (
        MONITORING,
        'endswith(each.key, "_CL")',
        'ends_with(each.key, "_CL")',
        "Terraform has no function ends_with",
    ),
    "a lifecycle that is no word of it": (
        CATALOG,
        "prevent_destroy = true",
        "prevents_destroy = true",
        "lifecycle takes no argument prevents_destroy",
    ),
    "a lifecycle that depends on a variable": (
        CATALOG,
        "prevent_destroy = true",
        'prevent_destroy = var.name == "prod"',
        "must be true or false, written out",
    ),
    "a provider that nobody handed in": (
        CATALOG,
        'resource "databricks_storage_credential" "this" {\n',
        'resource "databricks_storage_credential" "this" {\n  provider = databricks.account\n',
        "there is no provider databricks.account",
    ),
    "another provider's resource": (
        WORKSPACE,
        'resource "databricks_metastore_assignment" "this" {\n  provider = databricks.account',
        'resource "databricks_metastore_assignment" "this" {\n  provider = azurerm',
        "is no resource of the provider azurerm",
    ),
    "a module without its providers": (
        STAGE,
        "  providers = {\n    azurerm            = azurerm\n"
        "    databricks.account = databricks.account\n  }\n",
        "",
        "module workspace needs the provider databricks.account",
    ),
    "a provider inside a module": (
        NETWORK,
        'resource "azurerm_nat_gateway" "this" {',
        'provider "azurerm" {\n  features {}\n}\n\nresource "azurerm_nat_gateway" "this" {',
        "provider azurerm is configured inside a module",
    ),
    "a setting that the stage does not know": (
        "environments/prod/locals.tf",
        "max_capacity = 4",
        "max_capacity = 4\n        idle_minuets = 5",
        "this object takes no idle_minuets",
    ),
    "a setting left out": (
        "environments/prod/locals.tf",
        "    log_days       = 90\n",
        "",
        "this object lacks log_days",
    ),
    "a variable that only a comment uses": (
        "modules/storage/variables.tf",
        'variable "log_days" {',
        'variable "extra" {\n  type        = string\n'
        '  description = "Named in a comment only"\n}\n\n# var.extra\nvariable "log_days" {',
        "the variable extra is never used",
    ),
    "a variable that only its own validation uses": (
        "modules/storage/variables.tf",
        'variable "log_days" {',
        'variable "extra" {\n  type        = string\n  description = "Looked at by itself only"\n'
        '  validation {\n    condition     = var.extra != ""\n    error_message = "no"\n  }\n}\n\n'
        'variable "log_days" {',
        "the variable extra is never used",
    ),
    "a variable that only a string names": (
        "modules/storage/variables.tf",
        'variable "log_days" {',
        'variable "extra" {\n  type        = string\n  description = "Text: $${var.extra}"\n}\n\n'
        'variable "log_days" {',
        "the variable extra is never used",
    ),
    "a variable without a description": (
        "modules/storage/variables.tf",
        '  description = "Days until a blob of the container logs is deleted."\n',
        "",
        "variable log_days needs description",
    ),
    "a validation of another variable": (
        "modules/catalog/variables.tf",
        'can(regex("^[a-z][a-z0-9_]{1,62}$", var.catalog_name))',
        'can(regex("^[a-z][a-z0-9_]{1,62}$", var.name))',
        "a validation does not look at var.catalog_name",
    ),
    "a type": (
        "modules/cluster/variables.tf",
        "optional(bool, false)",
        "optional(boolean, false)",
        "there is no type boolean",
    ),
    "two of a name": (
        NETWORK,
        'resource "azurerm_public_ip" "nat"',
        'resource "azurerm_nat_gateway" "this" {}\n\nresource "azurerm_public_ip" "nat"',
        "resource azurerm_nat_gateway this stands twice",
    ),
    "an argument twice": (
        NETWORK,
        'allocation_method   = "Static"',
        'allocation_method   = "Static"\n  allocation_method   = "Static"',
        "allocation_method is given twice",
    ),
    "a provider's version that nobody checked": (
        "modules/network/terraform.tf",
        ">= 5.10, < 6",
        ">= 4.0, < 5",
        "the version of azurerm must be '>= 5.10, < 6'",
    ),
    "Azure's own check of a body switched off": (
        MONITORING,
        "  parent_id = azurerm_log_analytics_workspace.this.id\n",
        "  parent_id = azurerm_log_analytics_workspace.this.id\n"
        "  schema_validation_enabled = false\n",
        "Azure's own check of the body is switched off",
    ),
    "a key of a body": (
        MONITORING,
        "retentionInDays      = var",
        "retentionInDay       = var",
        "properties takes no retentionInDay",
    ),
    "a key of a body's columns": (
        MONITORING,
        "            name = column.name\n",
        "            nam = column.name\n",
        "properties.schema.columns takes no nam",
    ),
    "a backend that holds a reference": (
        "environments/sit/terraform.tf",
        'key              = "raypipe-sit.tfstate"',
        "key              = var.project",
        "a backend takes no references",
    ),
    "a nested block that the extract does not hold": (
        STORAGE,
        "  sas_policy {\n",
        '  routing {\n    choice = "x"\n  }\n\n  sas_policy {\n',
        "what routing takes is not in the extract",
    ),
    "a dependency on nothing": (
        "modules/access/main.tf",
        "depends_on = [databricks_mws_permission_assignment.group]",
        "depends_on = [databricks_mws_permission_assignment.groups]",
        "databricks_mws_permission_assignment has no groups",
    ),
    "null for what is required": (
        NETWORK,
        'allocation_method   = "Static"',
        "allocation_method   = null",
        "azurerm_public_ip.nat needs allocation_method",
    ),
    "a list to go over": (
        STORAGE,
        "for_each = local.containers",
        "for_each = tolist(local.containers)",
        "for_each takes no list",
    ),
    "the first of a set": (
        STORAGE,
        'this["logs"].name}/"]',
        'this["logs"].name}/${local.containers[0]}"]',
        "local.containers is a set",
    ),
    "a dependency on a variable": (
        "modules/access/main.tf",
        "depends_on = [databricks_mws_permission_assignment.jobs]",
        "depends_on = [var.workspace_id]",
        "depends_on names resources and modules only",
    ),
    "the key of an object": (
        "modules/catalog/locals.tf",
        '(var.group_names["readers"])   = ["USE_CATALOG", "USE_SCHEMA", "SELECT"]',
        '(var.groups_names["readers"])   = ["USE_CATALOG", "USE_SCHEMA", "SELECT"]',
        "var has no groups_names",
    ),
    "an attribute of a word": (
        STORAGE,
        "name                  = each.key",
        "name                  = each.value.name",
        "each.value is a string and has no name",
    ),
    "what a module makes many of": (
        STAGE,
        'module "network" {\n  source = "../network"\n',
        'module "network" {\n  source = "../network"\n  count  = 1\n',
        "module.network is a list and has no",
    ),
    "a circle": (
        "modules/storage/locals.tf",
        'containers = toset(["tables", "models", "logs"])',
        "containers = local.others\n  others = toset(local.containers)",
        "local.containers needs itself",
    ),
    "a file that is not there": (
        "modules/monitoring/locals.tf",
        "/streams.json",
        "/stream.json",
        "there is no file /stream.json",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_broken_is_named(lie: str) -> None:
    file, old, new, message = LIES[lie]
    found = check(having(file, old, new), KNOWN)
    assert [one for one in found if one.file.startswith(file.rpartition("/")[0])]
    assert any(message in str(one) for one in found), [str(one) for one in found]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modules/storage/extra.tf", 'resource "azurerm_public_ip" {{{'),
        ("modules/storage/extra.tf", "x = <<EOT\nnever closed"),
        ("modules/storage/extra.tf", 'locals {\n  a = "%{ if true }x%{ endif }"\n}\n'),
        ("modules/storage/extra.tf", "locals {\n  a = <<-EOT\n    ${var.\n  EOT\n}\n"),
        (
            "modules/storage/extra.tf",
            "locals {\n  a = <<-EOT\n    %{ if x }y%{ endif }\n  EOT\n}\n",
        ),
        ("modules/storage/extra.tf.json", '{"resource": {"azurerm_public_ip": {"x": {}}}}'),
        ("modules/storage/override.tf", "\x00"),
        ("modules/monitoring/streams.json", '{"RaypipeTraining_CL": '),
    ],
)
def test_a_file_that_cannot_be_read_is_a_finding(name: str, text: str) -> None:
    (found,) = [
        one for one in check(TREE.having(name, text), KNOWN) if "cannot be read" in str(one)
    ]
    assert found.file == name


def test_what_may_stand_there_is_no_finding() -> None:
    """A checker that refuses good files would be switched off."""
    text = """# var.nobody, module.nobody and ${nobody} stand in a comment
    /* resource "azurerm_nobody" "x" {} */
    locals {
      text   = "$${var.nobody} and %%{nobody}, \\"quoted\\""
      length = length(local.text) > 3 ? [for i, one in split(",", local.text) : "${i}-${one}"] : []
      lines  = <<-EOT
        # ${upper(local.text)} "quoted" $${var.nobody}
        { "a": ${jsonencode({ for key, one in var.tags : key => one if one != "" })} }
      EOT
      first  = try(local.length[0], local.lines, null)
    }
    output "extra" {
      description = "Uses what is above"
      value       = local.first
    }
    """
    assert check(TREE.having("modules/storage/extra.tf", text), KNOWN) == []


def test_each_module_has_the_layout_of_azure_verified_modules() -> None:
    folders = {Path(name).parent.as_posix() for name in TREE.texts}
    modules = {folder for folder in folders if folder.startswith("modules/")}
    assert {folder.partition("/")[2] for folder in modules} >= {
        "access",
        "cluster",
        "monitoring",
        "network",
        "policies",
        "sql_warehouse",
        "storage",
        "workspace",
    }
    assert folders - modules == {"bootstrap", *(f"environments/{stage}" for stage in STAGES)}
    for folder in folders:
        files = {Path(name).name for name in TREE.texts if Path(name).parent.as_posix() == folder}
        roots = set() if folder in modules else {"providers.tf"}
        assert files == {*LAYOUT, *roots}, folder
    home = {
        "variable": "variables.tf",
        "output": "outputs.tf",
        "locals": "locals.tf",
        "terraform": "terraform.tf",
        "provider": "providers.tf",
    }
    for name, text in TREE.texts.items():
        for block in parse(text).blocks:
            assert Path(name).name == home.get(block.type, "main.tf"), (name, block.type)
        for kind in ("variable", "output"):
            named = [block.labels[0] for block in parse(text).all(kind)]
            assert kind == "output" or named == sorted(named), name


def test_the_stages_differ_in_their_settings_only() -> None:
    for name in ("main.tf", "outputs.tf", "providers.tf", "variables.tf", "terraform.tf"):
        texts = {
            re.sub(rf"\b{stage}\b", "STAGE", TREE.texts[f"environments/{stage}/{name}"])
            for stage in STAGES
        }
        assert len(texts) == 1, name
    for stage in STAGES:
        (backend,) = (
            parse(TREE.texts[f"environments/{stage}/terraform.tf"]).blocks[0].body.all("backend")
        )
        given = {one.name: terraform_files.literal(one.value) for one in backend.body.arguments}
        assert given == {
            "container_name": stage,
            "key": f"raypipe-{stage}.tfstate",
            "use_azuread_auth": True,
        }
        (settings,) = parse(TREE.texts[f"environments/{stage}/locals.tf"]).blocks
        assert terraform_files.literal(settings.body.get("environment")) == stage


def test_an_apply_takes_no_data_away() -> None:
    kept = set()
    for text in TREE.texts.values():
        for block in parse(text).all("resource"):
            (*lives,) = block.body.all("lifecycle")
            if lives and lives[0].body.get("prevent_destroy") == terraform_files.Literal(True):
                kept.add(block.labels)
            else:
                assert block.labels[0] not in DATA, block.labels
    assert {kind for kind, _ in kept} == DATA


def test_no_secret_goes_in_or_out() -> None:
    for name, text in TREE.texts.items():
        body = parse(text)
        given = [one.name for block in blocks(body) for one in block.body.arguments]
        read = [
            node.word
            for expression in terraform_files.expressions(body)
            for node in terraform_files.walk(expression)
            if isinstance(node, terraform_files.Get)
        ]
        found = [word for word in (*given, *read) if SECRETS.search(word)]
        # Whether keys may be used at all, which is answered with no.
        assert set(found) <= {"shared_access_key_enabled"}, (name, found)


def test_the_columns_are_what_a_collection_rule_can_carry() -> None:
    streams = json.loads(TREE.data["modules/monitoring/streams.json"])
    assert streams
    for table, stream in streams.items():
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,58}_CL", table)
        assert set(stream) == {"columns"}
        names = [column["name"] for column in stream["columns"]]
        assert len(names) == len({name.lower() for name in names}) <= 500
        assert {"name": "TimeGenerated", "type": "datetime"} in stream["columns"]
        assert "RunId" in names
        for column in stream["columns"]:
            assert set(column) == {"name", "type"}
            assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{1,44}", column["name"])
            assert column["type"] in {
                "boolean",
                "datetime",
                "dynamic",
                "int",
                "long",
                "real",
                "string",
            }


def policy_keys(text: str) -> set[str]:
    """The attributes that the policies speak of."""
    return {
        str(key.value)
        for expression in terraform_files.expressions(parse(text))
        for node in terraform_files.walk(expression)
        if isinstance(node, terraform_files.Object)
        for key, value, *_ in node.items
        if isinstance(value, terraform_files.Object)
        and "type" in {str(inner.value) for inner, *_ in value.items}
    }


def unknown_policy_keys(text: str) -> list[str]:
    """Those that are no argument of a cluster: Databricks takes such a policy and ignores it."""
    cluster = KNOWN["resource"]["databricks_cluster"]
    out = []
    for key in sorted(policy_keys(text) - {"cluster_type", "dbus_per_hour"}):
        first, _, rest = key.partition(".")
        entry = cluster.get(first, {})
        inside = entry.get("block", {})
        plain = entry.get("type") == ["map", "string"] if rest else "type" in entry
        if not plain and rest not in inside:
            out.append(key)
    return out


def test_the_policies_speak_of_what_clusters_have() -> None:
    text = TREE.texts["modules/policies/locals.tf"]
    assert len(policy_keys(text)) > 15
    assert unknown_policy_keys(text) == []
    for right, wrong in (
        ("autoscale.max_workers", "autoscale.max_worker"),
        ('"num_workers"', '"number_workers"'),
        ("azure_attributes.availability", "azure_attribute.availability"),
    ):
        assert right in text
        assert len(unknown_policy_keys(text.replace(right, wrong))) == 1


def test_the_commands_of_the_readme_name_what_is_there() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    folders = set(re.findall(r"-chdir=(\S+)", text))
    assert "infra/terraform/bootstrap" in folders
    for folder in folders:
        for stage in STAGES:
            there = folder.replace("$STAGE", stage)
            assert (ROOT.parents[1] / there).is_dir(), there
    for stage in STAGES:
        variables = parse(TREE.texts[f"environments/{stage}/variables.tf"]).all("variable")
        for block in variables:
            if block.body.get("default") is None:
                assert f"`{block.labels[0]}`" in text, block.labels[0]
    outputs = parse(TREE.texts["environments/sit/outputs.tf"]).all("output")
    assert {block.labels[0] for block in outputs} <= set(re.findall(r"`(\w+)`", text))
