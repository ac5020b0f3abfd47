# What a stage is planned and applied to, by Terraform itself, with every provider mocked: no cloud, no account.
# The test copies this file into each environment's folder (tests/infra/test_terraform_itself.py).

mock_provider "azapi" {}

mock_provider "azurerm" {
  # Databricks' own number is text to azurerm and a number to databricks.
  mock_resource "azurerm_databricks_workspace" {
    defaults = {
      id            = "/subscriptions/0/resourceGroups/rg/providers/Microsoft.Databricks/workspaces/dbw"
      workspace_id  = "4711"
      workspace_url = "workspace.example"
    }
  }
  mock_resource "azurerm_storage_account" {
    defaults = {
      primary_dfs_host = "account.dfs.example"
    }
  }
}

mock_provider "databricks" {
  alias = "account"

  mock_resource "databricks_group" {
    defaults = {
      id = "17"
    }
  }
  mock_resource "databricks_service_principal" {
    defaults = {
      id             = "18"
      application_id = "00000000-0000-0000-0000-000000000018"
    }
  }
}

mock_provider "databricks" {
  alias = "workspace"
}

variables {
  alert_emails            = ["team@example.com"]
  budget_amount           = 500
  budget_start            = "2026-12-01"
  databricks_account_host = "https://accounts.example"
  databricks_account_id   = "00000000-0000-0000-0000-000000000001"
  deployer_client_id      = "00000000-0000-0000-0000-000000000002"
  location                = "westeurope"
  metastore_id            = "00000000-0000-0000-0000-000000000003"
  storage_suffix          = "abc"
  subscription_id         = "00000000-0000-0000-0000-000000000004"
}

run "everything_is_known_at_plan" {
  command = plan
}

run "what_the_bundle_and_the_sink_get" {
  command = apply

  assert {
    condition     = output.bundle_variables.host == "https://workspace.example"
    error_message = "the host is ${output.bundle_variables.host}"
  }
  assert {
    condition     = output.bundle_variables.storage == "abfss://tables@account.dfs.example"
    error_message = "the storage is ${output.bundle_variables.storage}"
  }
  assert {
    condition     = output.bundle_variables.principal == "00000000-0000-0000-0000-000000000018"
    error_message = "jobs run as ${output.bundle_variables.principal}"
  }
  assert {
    condition     = sort(keys(output.platform.policy_ids)) == tolist(["cpu", "gpu", "interactive", "single"])
    error_message = "policies: ${join(" ", keys(output.platform.policy_ids))}"
  }
  assert {
    condition     = length(output.sink.streams) > 0 && alltrue([for stream in output.sink.streams : can(regex("^Custom-[A-Za-z]+_CL$", stream))])
    error_message = "streams: ${join(" ", output.sink.streams)}"
  }
  assert {
    condition     = alltrue([for value in values(output.sink) : value != null && value != ""])
    error_message = "a setting of the sink is empty"
  }
}

run "a_region_by_its_display_name" {
  command = plan
  variables {
    location = "West Europe"
  }
  expect_failures = [var.location]
}

run "a_workspace_for_the_account" {
  command = plan
  variables {
    databricks_account_host = "https://adb-1.azuredatabricks.example"
  }
  expect_failures = [var.databricks_account_host]
}

run "a_name_for_an_id" {
  command = plan
  variables {
    metastore_id    = "metastore"
    subscription_id = "Production"
  }
  expect_failures = [var.metastore_id, var.subscription_id]
}

run "a_suffix_that_storage_refuses" {
  command = plan
  variables {
    storage_suffix = "My-Data"
  }
  expect_failures = [var.storage_suffix]
}
