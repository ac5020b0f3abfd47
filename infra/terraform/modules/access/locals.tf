locals {
  # What each group may do inside the workspace. Nobody may make clusters at will: a cluster needs a policy, which limits
  # its price. Members come from the company's directory (SCIM), never from here.
  groups = {
    engineers = { workspace = true, sql = true }
    operators = { workspace = true, sql = true }
    readers   = { workspace = false, sql = true }
  }

  rule_set = "accounts/${var.databricks_account_id}/servicePrincipals/${databricks_service_principal.jobs.application_id}/ruleSets/default"
}
