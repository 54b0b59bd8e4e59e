"""An order and a victim policy for Pointsman's scheduler."""
