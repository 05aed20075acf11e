"""What `outrider doctor` looks at. One check never stops another; none changes anything."""
