# bootstrap, planned and applied by Terraform itself with a mocked provider. See environment.tftest.hcl.

mock_provider "azurerm" {}

variables {
  administrator_object_id = "00000000-0000-0000-0000-000000000001"
  allowed_ip_ranges       = ["192.0.2.0/24"]
  location                = "westeurope"
  storage_suffix          = "abc"
  subscription_id         = "00000000-0000-0000-0000-000000000004"
  stage_subscription_ids = {
    sit  = "00000000-0000-0000-0000-000000000005"
    uat  = "00000000-0000-0000-0000-000000000006"
    prod = "00000000-0000-0000-0000-000000000007"
  }
  oidc_subjects = {
    sit  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:sit" }
    uat  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:uat" }
    prod = { issuer = "https://issuer.example", subject = "sc://plant/raypipe/prod" }
  }
}

run "everything_is_known_at_plan" {
  command = plan

  assert {
    condition     = length(regexall("GuidEquals \\{[0-9a-f-]{36}(, [0-9a-f-]{36}){2}\\}", azurerm_role_assignment.delegate["prod"].condition)) == 2
    error_message = "CI may hand out other roles: ${azurerm_role_assignment.delegate["prod"].condition}"
  }
}

run "the_rights_of_a_stage_end_at_its_subscription" {
  command = plan

  assert {
    condition = alltrue([
      for stage, id in var.stage_subscription_ids :
      azurerm_role_assignment.contributor[stage].scope == "/subscriptions/${id}" && azurerm_role_assignment.delegate[stage].scope == "/subscriptions/${id}"
    ])
    error_message = "CI of sit has rights in ${azurerm_role_assignment.contributor["sit"].scope}"
  }
}

run "a_stage_beside_the_states" {
  command = plan
  variables {
    stage_subscription_ids = {
      sit  = "00000000-0000-0000-0000-000000000004"
      uat  = "00000000-0000-0000-0000-000000000006"
      prod = "00000000-0000-0000-0000-000000000007"
    }
  }
  expect_failures = [var.stage_subscription_ids]
}

run "each_stage_has_an_identity" {
  command = apply

  assert {
    condition     = sort(keys(output.ci_client_ids)) == tolist(["prod", "sit", "uat"])
    error_message = "identities: ${join(" ", keys(output.ci_client_ids))}"
  }
  assert {
    condition     = output.backend_config.storage_account_name == "straypipetfabc"
    error_message = "the account is ${output.backend_config.storage_account_name}"
  }
}

run "the_longest_names" {
  command = plan
  variables {
    project        = "abcdefghij"
    storage_suffix = "abcdefgh"
  }

  assert {
    condition     = length(azurerm_storage_account.state.name) <= 24
    error_message = "the account would be called ${azurerm_storage_account.state.name}"
  }
}

run "any_pull_request" {
  command = plan
  variables {
    oidc_subjects = {
      sit  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:pull_request" }
      uat  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:uat" }
      prod = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:prod" }
    }
  }
  expect_failures = [var.oidc_subjects]
}

run "one_trust_for_two_stages" {
  command = plan
  variables {
    oidc_subjects = {
      sit  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:all" }
      uat  = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:uat" }
      prod = { issuer = "https://issuer.example", subject = "repo:plant/raypipe:environment:all" }
    }
  }
  expect_failures = [var.oidc_subjects]
}

run "a_range_that_azure_refuses" {
  command = plan
  variables {
    allowed_ip_ranges = ["192.0.2.7/32"]
  }
  expect_failures = [var.allowed_ip_ranges]
}
