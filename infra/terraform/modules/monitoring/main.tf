resource "azurerm_log_analytics_workspace" "this" {
  name                         = "log-${var.name}"
  location                     = var.location
  resource_group_name          = var.resource_group_name
  sku                          = "PerGB2018"
  retention_in_days            = var.retention_days
  daily_quota_gb               = var.daily_quota_gb
  local_authentication_enabled = false # Entra only: the workspace's key is a secret that lets anybody write
  tags                         = var.tags

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_monitor_data_collection_endpoint" "this" {
  name                          = "dce-${var.name}"
  location                      = var.location
  resource_group_name           = var.resource_group_name
  public_network_access_enabled = true # records come from any cluster, also from Ray elsewhere; each with an Entra token
  tags                          = var.tags
}

# azapi, because azurerm could not make tables of one's own before its version 5.
resource "azapi_resource" "table" {
  for_each = local.streams

  type      = "Microsoft.OperationalInsights/workspaces/tables@2022-10-01"
  name      = each.key
  parent_id = azurerm_log_analytics_workspace.this.id

  body = {
    properties = {
      plan                 = "Analytics"
      retentionInDays      = var.retention_days
      totalRetentionInDays = var.retention_days
      schema = {
        name = each.key
        columns = [
          for column in each.value.columns : {
            name = column.name
            type = lookup(local.table_types, column.type, column.type)
          }
        ]
      }
    }
  }

  lifecycle {
    prevent_destroy = true

    precondition {
      condition     = endswith(each.key, "_CL")
      error_message = "A table of one's own is called NAME_CL; streams.json has ${each.key}."
    }

    precondition {
      condition     = contains([for column in each.value.columns : "${column.name}:${column.type}"], "TimeGenerated:datetime")
      error_message = "${each.key} needs the column TimeGenerated of type datetime."
    }
  }
}

resource "azurerm_monitor_data_collection_rule" "this" {
  name                        = "dcr-${var.name}"
  location                    = var.location
  resource_group_name         = var.resource_group_name
  data_collection_endpoint_id = azurerm_monitor_data_collection_endpoint.this.id
  description                 = "Records of trainings, drift checks and servers of raypipe"
  tags                        = var.tags

  destinations {
    log_analytics {
      name                  = "workspace"
      workspace_resource_id = azurerm_log_analytics_workspace.this.id
    }
  }

  dynamic "stream_declaration" {
    for_each = local.streams

    content {
      stream_name = "Custom-${stream_declaration.key}"

      dynamic "column" {
        for_each = stream_declaration.value.columns

        content {
          name = column.value.name
          type = column.value.type
        }
      }
    }
  }

  # The table's own id, so that the rule waits for its table.
  dynamic "data_flow" {
    for_each = azapi_resource.table

    content {
      streams       = ["Custom-${data_flow.key}"]
      destinations  = ["workspace"]
      output_stream = "Custom-${data_flow.value.name}"
      transform_kql = "source"
    }
  }

  lifecycle {
    precondition {
      condition     = length(local.wrong_types) == 0
      error_message = "A collection rule cannot carry these columns: ${join(", ", local.wrong_types)}."
    }
  }
}

# The one right that sending takes. It allows neither reading nor changing.
resource "azurerm_role_assignment" "sender" {
  for_each = var.senders

  scope                = azurerm_monitor_data_collection_rule.this.id
  role_definition_name = "Monitoring Metrics Publisher"
  principal_id         = each.value
  principal_type       = "ServicePrincipal"
}

resource "azurerm_monitor_diagnostic_setting" "workspace" {
  name                           = "audit"
  target_resource_id             = var.workspace_id
  log_analytics_workspace_id     = azurerm_log_analytics_workspace.this.id
  log_analytics_destination_type = "Dedicated"

  dynamic "enabled_log" {
    for_each = local.audit_categories

    content {
      category = enabled_log.value
    }
  }
}

resource "azurerm_monitor_action_group" "cost" {
  name                = "ag-${var.name}-cost"
  resource_group_name = var.resource_group_name
  short_name          = "raypipecost"
  tags                = var.tags

  dynamic "email_receiver" {
    for_each = toset(var.alert_emails)

    content {
      name                    = email_receiver.value
      email_address           = email_receiver.value
      use_common_alert_schema = true
    }
  }
}

# Of the subscription, with a filter, because most of the money goes into the resource group that Databricks makes itself.
resource "azurerm_consumption_budget_subscription" "this" {
  name            = "budget-${var.name}"
  subscription_id = "/subscriptions/${var.subscription_id}"
  amount          = var.budget_amount
  time_grain      = "Monthly"

  time_period {
    start_date = "${var.budget_start}T00:00:00Z"
  }

  filter {
    dimension {
      name   = "ResourceGroupName"
      values = var.budget_resource_groups
    }
  }

  dynamic "notification" {
    for_each = local.notifications

    content {
      operator       = "GreaterThanOrEqualTo"
      threshold      = notification.value.threshold
      threshold_type = notification.value.type
      contact_groups = [azurerm_monitor_action_group.cost.id]
    }
  }
}
