resource "azurerm_resource_group" "this" {
  name     = "rg-${var.project}-state"
  location = var.location
  tags     = local.tags

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_storage_account" "state" {
  # checkov:skip=CKV_AZURE_33:no queue is used
  # checkov:skip=CKV_AZURE_35:denied as soon as allowed_ip_ranges has one range; hosted runners have no fixed address
  # checkov:skip=CKV_AZURE_59:CI's runners have no network of ours; allowed_ip_ranges narrows it, and every call needs an Entra token
  # checkov:skip=CKV2_AZURE_33:no private endpoint for the same reason
  # checkov:skip=CKV2_AZURE_1:Microsoft's keys: a lost key would lose the state of everything
  name                              = "st${var.project}tf${var.storage_suffix}" # at most 24 letters
  location                          = var.location
  resource_group_name               = azurerm_resource_group.this.name
  account_kind                      = "StorageV2"
  account_tier                      = "Standard"
  account_replication_type          = "GZRS"
  min_tls_version                   = "TLS1_2"
  https_traffic_only_enabled        = true
  shared_access_key_enabled         = false
  default_to_oauth_authentication   = true
  local_user_enabled                = false
  public_network_access_enabled     = true
  allow_nested_items_to_be_public   = false
  cross_tenant_replication_enabled  = false
  infrastructure_encryption_enabled = true
  tags                              = local.tags

  # A state that an apply spoiled can be taken back.
  blob_properties {
    versioning_enabled = true

    delete_retention_policy {
      days = 90
    }

    container_delete_retention_policy {
      days = 90
    }
  }

  network_rules {
    default_action = length(var.allowed_ip_ranges) == 0 ? "Allow" : "Deny"
    bypass         = ["AzureServices"]
    ip_rules       = var.allowed_ip_ranges
  }

  sas_policy {
    expiration_period = "00.01:00:00"
    expiration_action = "Log"
  }

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_storage_container" "state" {
  # checkov:skip=CKV2_AZURE_21:each state's versions say who wrote what; reading is limited to one identity a container
  for_each = setunion(local.stages, ["bootstrap"])

  name                  = each.key
  storage_account_id    = azurerm_storage_account.state.id
  container_access_type = "private"

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_role_assignment" "administrators" {
  scope                = azurerm_storage_account.state.id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = var.administrator_object_id
}

# One identity a stage. CI proves who it is with its own OIDC token; there is no secret to steal or to renew.
resource "azurerm_user_assigned_identity" "ci" {
  for_each = local.stages

  name                = "id-${var.project}-${each.key}-ci"
  location            = var.location
  resource_group_name = azurerm_resource_group.this.name
  tags                = local.tags
}

resource "azurerm_federated_identity_credential" "ci" {
  for_each = var.oidc_subjects

  name                      = "ci"
  user_assigned_identity_id = azurerm_user_assigned_identity.ci[each.key].id
  issuer                    = each.value.issuer
  subject                   = each.value.subject
  audience                  = ["api://AzureADTokenExchange"]
}

# Its own state only: sit's pipeline can neither read nor spoil prod's. This holds because its rights below end at its own
# subscription, and the account of the states is in another one: see the variable stage_subscription_ids.
resource "azurerm_role_assignment" "state" {
  for_each = local.stages

  scope                = azurerm_storage_container.state[each.key].id
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = azurerm_user_assigned_identity.ci[each.key].principal_id
  principal_type       = "ServicePrincipal"
}

# Of the stage's subscription, because a stage makes its own resource group. Stages of one subscription may change each other.
resource "azurerm_role_assignment" "contributor" {
  for_each = local.stages

  scope                = "/subscriptions/${var.stage_subscription_ids[each.key]}"
  role_definition_name = "Contributor"
  principal_id         = azurerm_user_assigned_identity.ci[each.key].principal_id
  principal_type       = "ServicePrincipal"
}

# The right to hand out three roles, to service principals only. Without the condition CI could make itself Owner.
resource "azurerm_role_assignment" "delegate" {
  for_each = local.stages

  scope                = "/subscriptions/${var.stage_subscription_ids[each.key]}"
  role_definition_name = "Role Based Access Control Administrator"
  principal_id         = azurerm_user_assigned_identity.ci[each.key].principal_id
  principal_type       = "ServicePrincipal"
  condition_version    = "2.0"
  condition            = <<-EOT
    (
      !(ActionMatches{'Microsoft.Authorization/roleAssignments/write'})
      OR
      (
        @Request[Microsoft.Authorization/roleAssignments:RoleDefinitionId] ForAnyOfAnyValues:GuidEquals {${local.delegable}}
        AND
        @Request[Microsoft.Authorization/roleAssignments:PrincipalType] ForAnyOfAnyValues:StringEqualsIgnoreCase {'ServicePrincipal'}
      )
    )
    AND
    (
      !(ActionMatches{'Microsoft.Authorization/roleAssignments/delete'})
      OR
      @Resource[Microsoft.Authorization/roleAssignments:RoleDefinitionId] ForAnyOfAnyValues:GuidEquals {${local.delegable}}
    )
  EOT
}
