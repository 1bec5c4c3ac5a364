"""Agent programs of the recipes; they know the policy by its address alone."""
