locals {
  # Spend queries count by these.
  tags = {
    project = "raypipe"
    stage   = var.environment
  }
}
