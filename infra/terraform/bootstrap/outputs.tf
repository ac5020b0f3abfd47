output "backend_config" {
  description = "What `terraform init -backend-config` of every stage is given."
  value = {
    storage_account_name = azurerm_storage_account.state.name
  }
}

output "ci_client_ids" {
  description = "Client id of each stage's CI identity: ARM_CLIENT_ID of its pipeline, and the stage's variable deployer_client_id."
  value       = { for stage, identity in azurerm_user_assigned_identity.ci : stage => identity.client_id }
}
