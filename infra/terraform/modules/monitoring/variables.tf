variable "alert_emails" {
  type        = list(string)
  description = "Who hears of the budget."
  nullable    = false

  validation {
    condition     = length(var.alert_emails) > 0 && alltrue([for email in var.alert_emails : can(regex("^[^@ ]+@[^@ ]+\\.[^@ ]+$", email))])
    error_message = "alert_emails must be at least one e-mail address."
  }
}

variable "budget_amount" {
  type        = number
  description = "Money a month, in the subscription's currency. Mails go out at half of it, at 80 %, and when the forecast passes it."
  nullable    = false

  validation {
    condition     = var.budget_amount >= 1
    error_message = "budget_amount must be at least 1."
  }
}

variable "budget_resource_groups" {
  type        = list(string)
  description = "Resource groups that the budget counts: this stage's, and Databricks' own with the virtual machines."
  nullable    = false
}

variable "budget_start" {
  type        = string
  description = "First day that the budget counts, the first of a month, as 2026-12-01. Azure refuses a month that is over."
  nullable    = false

  validation {
    condition     = can(regex("^20\\d\\d-(0[1-9]|1[0-2])-01$", var.budget_start))
    error_message = "budget_start must be the first of a month, as 2026-12-01."
  }
}

variable "daily_quota_gb" {
  type        = number
  description = "Gigabytes a day that Log Analytics takes in. Beyond them it takes none until the next day: the cap of its price."
  nullable    = false

  validation {
    condition     = var.daily_quota_gb > 0 && var.daily_quota_gb <= 100
    error_message = "daily_quota_gb must be above 0 and at most 100. -1 would mean no cap."
  }
}

variable "location" {
  type        = string
  description = "Azure region of all resources."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of every resource's name, for example raypipe-sit."
  nullable    = false
}


variable "resource_group_name" {
  type        = string
  description = "Name of that resource group."
  nullable    = false
}

variable "retention_days" {
  type        = number
  description = "Days that records are kept."
  nullable    = false

  validation {
    condition     = contains([30, 60, 90, 120, 180, 270, 365, 550, 730], var.retention_days)
    error_message = "retention_days must be 30, 60, 90, 120, 180, 270, 365, 550 or 730."
  }
}

variable "senders" {
  type        = map(string)
  description = "Object id of each identity that sends records, by a name that is known before it is made."
  nullable    = false
}

variable "subscription_id" {
  type        = string
  description = "Id of the subscription that the budget belongs to."
  nullable    = false
}

variable "tags" {
  type        = map(string)
  description = "Tags of every resource."
  nullable    = false
}

variable "workspace_id" {
  type        = string
  description = "Azure resource id of the Databricks workspace, whose audit log is kept here."
  nullable    = false
}
