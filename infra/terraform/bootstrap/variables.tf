variable "administrator_object_id" {
  type        = string
  description = "Object id of the Entra group that may read and write every state. Whoever bootstraps must be in it."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.administrator_object_id))
    error_message = "administrator_object_id must be a UUID in lower case."
  }
}

variable "allowed_ip_ranges" {
  type        = list(string)
  description = "Public IPv4 addresses and ranges that reach the state: the office, CI's runners. Empty: from anywhere, with an Entra token."
  nullable    = false

  validation {
    condition     = alltrue([for range in var.allowed_ip_ranges : can(regex("^(\\d{1,3}\\.){3}\\d{1,3}(/(\\d|[12]\\d|30))?$", range))])
    error_message = "allowed_ip_ranges must be public IPv4 addresses or ranges up to /30: Azure refuses /31 and /32, write the address alone."
  }
}

variable "location" {
  type        = string
  description = "Azure region of all resources, as westeurope."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+[0-9]?$", var.location))
    error_message = "location must be a region's short name, lower-case letters and a digit, as westeurope."
  }
}

variable "oidc_subjects" {
  type = map(object({
    issuer  = string
    subject = string
  }))
  description = "Whom Azure trusts as CI of each stage: issuer and subject of its OIDC token. No secret is stored anywhere."
  nullable    = false

  validation {
    condition     = length(setsubtract(["sit", "uat", "prod"], keys(var.oidc_subjects))) == 0 && length(var.oidc_subjects) == 3
    error_message = "oidc_subjects must have the keys sit, uat and prod."
  }

  validation {
    condition     = alltrue([for trust in values(var.oidc_subjects) : startswith(trust.issuer, "https://")])
    error_message = "An issuer must be an https:// address, without a slash at its end."
  }

  # A subject with a branch or "pull_request" would let any pull request deploy; an environment is guarded by its reviewers.
  validation {
    condition     = alltrue([for trust in values(var.oidc_subjects) : can(regex("^(repo:[^:*]+:environment:[^:*]+|sc://[^/*]+/[^/*]+/[^/*]+)$", trust.subject))])
    error_message = "A subject must be repo:OWNER/NAME:environment:STAGE (GitHub) or sc://ORGANISATION/PROJECT/CONNECTION (Azure DevOps)."
  }

  validation {
    condition     = length(distinct([for trust in values(var.oidc_subjects) : trust.subject])) == 3
    error_message = "Each stage needs a subject of its own, or sit's pipeline could deploy prod."
  }
}

variable "project" {
  type        = string
  description = "First part of every name."
  default     = "raypipe"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9]{1,9}$", var.project))
    error_message = "project must be 2 to 10 lower-case letters and digits, letter first: it is a part of the storage account's name."
  }
}

variable "stage_subscription_ids" {
  type        = map(string)
  description = "Id of the subscription of each stage, in which its CI may make resources and hand out roles. One each keeps stages apart."
  nullable    = false

  validation {
    condition     = length(setsubtract(["sit", "uat", "prod"], keys(var.stage_subscription_ids))) == 0 && length(var.stage_subscription_ids) == 3
    error_message = "stage_subscription_ids must have the keys sit, uat and prod."
  }

  validation {
    condition     = alltrue([for id in values(var.stage_subscription_ids) : can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", id))])
    error_message = "A subscription's id must be a UUID in lower case."
  }

  validation {
    condition     = !contains(values(var.stage_subscription_ids), var.subscription_id)
    error_message = "The states need a subscription of their own: CI of a stage that is in subscription_id could give itself the state of any other."
  }
}

variable "storage_suffix" {
  type        = string
  description = "Makes the state account's name unique in all of Azure: 3 to 8 lower-case letters and digits of your choice."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]{3,8}$", var.storage_suffix))
    error_message = "storage_suffix must be 3 to 8 lower-case letters and digits."
  }
}

variable "subscription_id" {
  type        = string
  description = "Id of the subscription of the states and of CI's identities, in which there is no stage."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.subscription_id))
    error_message = "subscription_id must be a UUID in lower case."
  }
}
