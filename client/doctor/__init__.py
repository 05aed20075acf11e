"""The checks of `outrider doctor`. A failed check never stops another one; none changes anything."""
