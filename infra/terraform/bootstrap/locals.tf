locals {
  stages = toset(keys(var.oidc_subjects))

  tags = {
    project = var.project
    stage   = "bootstrap"
    made_by = "terraform"
  }

  # Roles that CI may hand out, and no others: see the condition in main.tf.
  delegable_roles = {
    "Storage Blob Data Contributor" = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"
    "Storage Blob Delegator"        = "db58b8e5-c6ad-4a2a-8342-4190687cbf4a"
    "Monitoring Metrics Publisher"  = "3913510d-42f4-4e42-8a64-420c390055eb"
  }
  delegable = join(", ", values(local.delegable_roles))
}
