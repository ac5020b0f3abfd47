variable "databricks_account_id" {
  type        = string
  description = "Id of the Databricks account, a part of the names of access rules."
  nullable    = false
}

variable "deployer_client_id" {
  type        = string
  description = "Client id of the identity that deploys the bundle: it may make jobs run as the jobs' service principal."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of groups and service principals, for example raypipe-sit."
  nullable    = false
}

variable "workspace_id" {
  type        = string
  description = "Databricks' number of the workspace that groups and service principal are let into."
  nullable    = false
}
